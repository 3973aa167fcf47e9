"""Tokens of the REST interface: only their hashes are kept."""

import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Literal, get_args

from sqlalchemy import bindparam, func, insert, select, update

from everstep.store.database import Database
from everstep.store.tables import tokens

Scope = Literal["webhook", "read", "operate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""From `read` on, each allows what those before it allow; `webhook` allows webhooks only."""

_TOKEN = re.compile(r"evs_([0-9a-f]{12})_([0-9a-f]{64})")
_NOBODY = "0" * 64


@dataclass(frozen=True, slots=True)
class Token:
    """A token without its secret, which is not stored."""

    id: str
    name: str
    scope: Scope
    created_us: int
    expires_us: int | None = None
    last_used_us: int | None = None
    revoked_us: int | None = None

    def is_good(self, now_us: int) -> bool:
        """Neither expired nor revoked."""
        return self.revoked_us is None and (self.expires_us is None or now_us < self.expires_us)


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A token with the hash of its secret."""

    token: Token
    secret_sha256: str


class Tokens:
    """The tokens of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def make(
        self, name: str, scope: Scope, *, now_us: int, expires_us: int | None = None
    ) -> tuple[Token, str]:
        """A new token and its text, which cannot be read again."""
        token = Token(secrets.token_hex(6), name, scope, now_us, expires_us)
        secret = secrets.token_hex(32)
        row = {**asdict(token), "secret_sha256": _hash(secret)}
        async with self._database.write() as connection:
            await connection.execute(insert(tokens).values(row))
        return token, f"evs_{token.id}_{secret}"

    async def find(self, text: str) -> Token | None:
        """The token with this text, valid or not; None when there is none."""
        id_ = id_in(text)
        if id_ is None:
            return None
        return matching(text, (await self.stored({id_})).get(id_))

    async def stored(self, ids: Collection[str]) -> Mapping[str, StoredToken]:
        """The tokens with these ids, in one query."""
        async with self._database.read() as connection:
            query = select(tokens).where(tokens.c.id.in_(sorted(ids)))
            rows = (await connection.execute(query)).mappings().all()
        return {row["id"]: StoredToken(_token(row), row["secret_sha256"]) for row in rows}

    async def by_id(self, id_: str) -> Token | None:
        """The token with this id."""
        async with self._database.read() as connection:
            query = select(tokens).where(tokens.c.id == id_)
            row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else _token(row)

    async def any(self) -> bool:
        """Whether a token was ever made."""
        async with self._database.read() as connection:
            query = select(func.count()).select_from(tokens)
            return bool((await connection.execute(query)).scalar_one())

    async def revoke(self, id_: str, *, now_us: int) -> bool:
        """Revoke a token; False when there is none, or it was revoked before."""
        here = (tokens.c.id == id_) & tokens.c.revoked_us.is_(None)
        async with self._database.write() as connection:
            done = await connection.execute(update(tokens).where(here).values(revoked_us=now_us))
        return bool(done.rowcount)

    async def note_used(self, last_used_us: Mapping[str, int]) -> None:
        """Write when tokens were last used, many at once."""
        if not last_used_us:
            return
        mark = (
            update(tokens)
            .where(tokens.c.id == bindparam("used_id"))
            .values(last_used_us=bindparam("used_us"))
        )
        rows = [{"used_id": id_, "used_us": us} for id_, us in sorted(last_used_us.items())]
        async with self._database.write() as connection:
            await connection.execute(mark, rows)


def id_in(text: str) -> str | None:
    """The id in the text of a token; None where it is not the text of any."""
    match = _TOKEN.fullmatch(text)
    return None if match is None else match[1]


def matching(text: str, stored: StoredToken | None) -> Token | None:
    """The stored token, if this is its text."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        return None
    expected = _NOBODY if stored is None else stored.secret_sha256
    # Compared also when there is no such token, and in constant time.
    is_it = hmac.compare_digest(_hash(match[2]), expected)
    return stored.token if stored is not None and is_it else None


def allows(has: Scope, needs: Scope) -> bool:
    """Whether one scope includes another. Readers send no webhooks, senders read nothing."""
    if needs == "webhook":
        return has != "read"
    return SCOPES.index(has) >= SCOPES.index(needs)


def _hash(secret: str) -> str:
    # 256 random bits cannot be guessed, so nothing slower is needed.
    return sha256(secret.encode()).hexdigest()


def _token(row: Mapping[Any, Any]) -> Token:
    return Token(**{name: value for name, value in row.items() if name != "secret_sha256"})
