"""The first token: written straight into the database, when no token can ask for one yet."""

import asyncio
from pathlib import Path
from typing import Any, cast

from everstep.clock import SystemClock
from everstep.store.database import open_database
from everstep.store.schema import upgrade
from everstep.store.times import from_us, to_us
from everstep.store.tokens import Scope, Tokens


def make_token(
    url: str, password_file: Path | None, *, name: str, scope: str, expires_in_s: int | None
) -> dict[str, Any]:
    """A new token, as the API would answer; the database is brought to our schema first."""
    return asyncio.run(_make_token(url, password_file, name, cast("Scope", scope), expires_in_s))


async def _make_token(
    url: str, password_file: Path | None, name: str, scope: Scope, expires_in_s: int | None
) -> dict[str, Any]:
    now_us = to_us(SystemClock().wall())
    expires_us = None if expires_in_s is None else now_us + expires_in_s * 1_000_000
    async with open_database(url, password_file=password_file) as database:
        await upgrade(database)
        token, text = await Tokens(database).make(name, scope, now_us=now_us, expires_us=expires_us)
    return {
        "id": token.id,
        "name": name,
        "scope": scope,
        "created_at": from_us(now_us),
        "expires_at": None if expires_us is None else from_us(expires_us),
        "token": text,
    }
