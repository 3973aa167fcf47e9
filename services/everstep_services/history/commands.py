"""What an operator does once: rebuild the tables, or make a token."""

import asyncio
import errno
import logging
import os
from pathlib import Path

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.store.database import Database
from everstep.store.log import FactLog
from everstep.store.times import to_us
from everstep.store.tokens import Scope, Tokens

log = logging.getLogger(__name__)


class TokenFileError(EverstepError):
    """The first token cannot be written where it should be."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"the first token cannot be written to {path}: {error.strerror}; "
            f"set api.first_token_file to a new file in a folder of this user"
        )


async def rebuild(fact_log: FactLog, most: int = 2000) -> int:
    """Make the projected tables again from the log; how many facts it has.

    It may run while the service does, and may be cut off: the next writer continues it.
    """
    facts = await fact_log.start_rebuild()
    while remaining := await fact_log.catch_up(most):
        log.debug("rebuilding remaining=%d", remaining)
    return facts


async def make_token(
    database: Database, name: str, scope: Scope, clock: Clock, *, expires_in_s: int | None = None
) -> str:
    """A new token's text, which cannot be had again."""
    now_us = to_us(clock.wall())
    expires_us = None if expires_in_s is None else now_us + expires_in_s * 1_000_000
    _, text = await Tokens(database).make(name, scope, now_us=now_us, expires_us=expires_us)
    return text


async def make_first_token(database: Database, path: Path, clock: Clock) -> bool:
    """When there is no token yet, make one for an administrator, for this user's eyes only."""
    if await Tokens(database).any():
        return False
    # The file comes before the token: a token that nobody could read would be the only one for
    # ever. The file gets its name when it is whole: a process may wait for it.
    fresh = await asyncio.to_thread(_make_file, path)
    text = await make_token(database, "first", "admin", clock)
    await asyncio.to_thread(_write, fresh, path, text)
    log.info("first_token_written path=%s", path)
    return True


def _make_file(path: Path) -> Path:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise TokenFileError(path, error) from error
    return fresh


def _write(fresh: Path, path: Path, text: str) -> None:
    fresh.write_text(f"{text}\n")
    fresh.replace(path)
