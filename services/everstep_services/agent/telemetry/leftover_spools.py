"""Facts left in spools of this state directory by earlier agents, sent by the next one.

Next to each spool a file says where its bus is and how its agent logged in: paths of secrets, not
the secrets. So facts of a job are sent with the login of that job.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec

from everstep.bus import BusSettings, connect
from everstep.bus.errors import BusError, SpoolBusyError, SpoolError
from everstep.bus.facts.spool import Spool
from everstep.evidence.files import read_regular

log = logging.getLogger(__name__)

LOGIN = "login.json"
_WITHIN_S = 10.0
_PATHS = (
    *("password_file", "credentials_file", "renewed_credentials_file", "nkey_seed_file"),
    *("ca_file", "cert_file", "key_file"),
)
_TEXTS = ("url", "user", "inbox_prefix")


@dataclass(frozen=True, slots=True)
class SentSpool:
    """The outcome for one spool."""

    spool: str
    size_bytes: int
    """The bytes that waited in it."""
    error: str = ""
    """Why the spool still waits; empty when the stream has all of it."""


def remember(folder: Path, settings: BusSettings) -> None:
    """Write next to the spool in `folder` how its facts reach their bus. Raises OSError."""
    paths = {name: _text(getattr(settings, name)) for name in _PATHS}
    texts = {name: getattr(settings, name) for name in _TEXTS}
    fresh = folder / f"{LOGIN}.new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(paths | texts))
    fresh.replace(folder / LOGIN)


async def send_left(spools: Path, within_s: float) -> AsyncIterator[SentSpool]:
    """Send the contents of each spool below `spools` that no process has open, one by one.

    `within_s` bounds the connection, and then the sending, for each of them.
    """
    for folder in await asyncio.to_thread(lambda: sorted(spools.glob("*/"))):
        with contextlib.suppress(SpoolBusyError):  # its process lives, and sends it
            size_bytes = await asyncio.to_thread(_waiting_bytes, folder)
            if size_bytes:
                yield SentSpool(folder.name, size_bytes, await _send(folder, within_s))


async def send_left_and_log(spools: Path) -> None:
    """Send the spools, and only log the outcome."""
    async for sent in send_left(spools, _WITHIN_S):
        log.info("left_facts spool=%s bytes=%d error=%s", *astuple(sent))


async def _send(folder: Path, within_s: float) -> str:
    """Send all of one spool; return why some of it still waits."""
    try:
        settings = await asyncio.to_thread(_recall, folder, within_s)
        async with connect(settings, folder.name, spool=folder) as bus:
            await bus.flush(within_s)
    except (BusError, SpoolError, OSError, ValueError) as error:
        return str(error)
    return ""


def _recall(folder: Path, within_s: float) -> BusSettings:
    try:
        kept = msgspec.json.decode(read_regular(folder / LOGIN), type=dict[str, str | None])
    except FileNotFoundError:
        raise ValueError(f"{folder} does not say how its process logged in: no {LOGIN}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{folder / LOGIN} cannot be read: {error}") from error
    given = {name: value for name, value in kept.items() if value is not None}
    texts = {name: given[name] for name in _TEXTS if name in given}
    paths = {name: Path(given[name]) for name in _PATHS if name in given}
    return BusSettings(connect_within_s=within_s, **texts, **paths)  # type: ignore[arg-type]


def _waiting_bytes(folder: Path) -> int:
    try:
        spool = Spool.open(folder)
    except SpoolError as error:
        if isinstance(error, SpoolBusyError):
            raise
        log.warning("spool_unreadable spool=%s error=%s", folder, error)
        return 0
    try:
        return spool.pending_bytes
    finally:
        spool.close()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
