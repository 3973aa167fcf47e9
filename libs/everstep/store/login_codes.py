"""Codes for one login, in the database: any replica may take what another one has made.

Neither a code nor its token can be read from the database: a row is found by the code's hash, and
its token is sealed with a key that only the code gives.
"""

import secrets
from hashlib import sha256, shake_256

from sqlalchemy import delete, insert, select

from everstep.clock import Clock
from everstep.store.database import Database
from everstep.store.tables import login_codes
from everstep.store.times import to_us

LASTS_S = 60.0
_CODES_MOST = 1000


class LoginCodes:
    """The codes of one database. Each is valid once, within a minute."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def make(self, token: str) -> str:
        """A code for this token, which REST has admitted."""
        code = secrets.token_urlsafe(24)
        now_us = to_us(self._clock.wall())
        row = {
            "code_sha256": _hash(code),
            "sealed": _sealed(code, token.encode()),
            "expires_us": now_us + int(LASTS_S * 1e6),
        }
        here = login_codes.c
        newest = select(here.code_sha256).order_by(here.expires_us.desc()).limit(_CODES_MOST)
        async with self._database.write() as connection:
            await connection.execute(delete(login_codes).where(here.expires_us <= now_us))
            await connection.execute(insert(login_codes).values(row))
            await connection.execute(delete(login_codes).where(here.code_sha256.not_in(newest)))
        return code

    async def take(self, code: str) -> str | None:
        """The token, the first time and in time only."""
        here = login_codes.c
        wanted = delete(login_codes).where(here.code_sha256 == _hash(code))
        async with self._database.write() as connection:
            query = wanted.returning(here.sealed, here.expires_us)
            row = (await connection.execute(query)).one_or_none()
        if row is None or row.expires_us <= to_us(self._clock.wall()):
            return None
        return _sealed(code, row.sealed).decode()


def _hash(code: str) -> str:
    return sha256(code.encode()).hexdigest()


def _sealed(code: str, text: bytes) -> bytes:
    """The text, combined with a key stream of the code; the same again gives the text."""
    stream = shake_256(b"everstep login code\0" + code.encode()).digest(len(text))
    return bytes(a ^ b for a, b in zip(text, stream, strict=True))
