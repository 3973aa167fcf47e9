"""A job's history as one file: its facts, those about its nodes, and its evidence.

The file is a database of history, packed with zstandard. `everstep serve --bundle` opens it on any
machine, without a bus and without a service.
"""

import asyncio
import itertools
import re
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, Text, and_, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from everstep import __version__
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.evidence.files import open_regular
from everstep.messages import BlobRef
from everstep.messages.codec import BadMessageError, fact_in
from everstep.store import tables
from everstep.store.database import WARY, Database, open_database
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.log import FactLog, NewFact
from everstep.store.queries import Record
from everstep.store.schema import upgrade
from everstep.store.times import from_us
from everstep.subjects import CLUSTER, is_name
from everstep_services.history.mask import mask_fact, mask_file
from everstep_services.history.projections.fold import fold

SUFFIX = ".everstep"
STREAM = "bundle"
_AT_ONCE = 1000
_NODES_MOST = 5000
_MOST_BYTES = 2 << 30
"""Evidence beyond that is left out, which the bundle notes."""
_MOST_RATIO, _RATIO_FROM_BYTES = 200, 64 << 20
"""The largest ratio of unpacked to packed, above a size."""
_LEFT_OUT = f"the bundle has {_MOST_BYTES >> 30} GiB of evidence already"

Fetch = Callable[[BlobRef], Coroutine[Any, Any, bytes]]
"""The content of a blob, whole; raises an `EverstepError` where it is gone or out of reach."""


class BundleError(EverstepError):
    """A file that is not a bundle, or one that cannot be opened."""


_DAMAGE: Final = (
    *(ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError),
    *(BadMessageError, SQLAlchemyError, sqlite3.Error),
)
"""Errors of values that cannot be read: a bundle is a file from elsewhere, and has the fault."""


def damage_text(error: BaseException) -> str | None:
    """What is wrong with a bundle, in one line; None if its values have not caused the error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, _DAMAGE):
        return None
    first = str(error).partition("\n")[0][:200]
    return f"the bundle is damaged: {type(error).__name__}: {first}"


_origin = Table(
    "bundle_origin",
    MetaData(),
    Column("job", Text, nullable=False),
    Column("exported_us", BigInteger, nullable=False),
    Column("version", Text, nullable=False),
    Column("facts", Integer, nullable=False),
    Column("evidence", Integer, nullable=False),
    Column("evidence_missing", Integer, nullable=False),
)
"""Only bundles have this table; a release that does not know it ignores it."""


@dataclass(frozen=True, slots=True)
class BundleOrigin:
    """Of what a bundle is, and when it was written."""

    job: str
    exported_at: datetime | None
    """None in a bundle of a release that did not write it."""
    until: datetime
    """The time at which the bundle shows the job: the export, or else the newest fact."""
    version: str | None
    evidence_missing: int | None


class BundleClock(SystemClock):
    """Time stands still in a bundle: a job that ran at the export has not run ever since."""

    def __init__(self, origin: BundleOrigin) -> None:
        self._until = origin.until

    def wall(self) -> datetime:
        """The moment of the export."""
        return self._until


@dataclass(frozen=True, slots=True)
class BundleContents:
    """What was put into a bundle."""

    facts: int
    blobs: int
    missing_blobs: int
    """Evidence that is gone, or that could not be fetched."""


async def write_bundle(
    source: Database, job: str, file: Path, *, fetch: Fetch, now_us: int
) -> BundleContents:
    """Write a job's history into a file. `file` must not exist; a folder next to it is used."""
    plain = file.with_name(f"{file.name}.db")
    try:
        async with open_database(f"sqlite:///{plain}") as target:
            await upgrade(target)
            facts = await _copy_facts(source, target, job)
            blobs, missing = await _copy_blobs(source, target, job, fetch, now_us)
            row = {"job": job, "exported_us": now_us, "version": __version__, "facts": facts,
                   "evidence": blobs, "evidence_missing": missing}  # fmt: skip
            async with target.write() as connection:
                await connection.run_sync(_origin.create)
                await connection.execute(_origin.insert().values(row))
        await asyncio.to_thread(_pack, plain, file)
    finally:
        await asyncio.to_thread(_remove, plain)
    return BundleContents(facts, blobs, missing)


async def read_origin(database: Database) -> BundleOrigin | None:
    """Of what a bundle is; None where it has no fact of any job. Raises `BundleError`."""
    try:
        origin = await _read_origin(database)
        is_possible = origin is None or is_name(origin.job)
    except _DAMAGE as error:
        raise BundleError(str(damage_text(error))) from error
    if origin is not None and not is_possible:
        raise BundleError(f"the bundle is damaged: {origin.job!r} is not the name of a job")
    return origin


async def _read_origin(database: Database) -> BundleOrigin | None:
    facts = tables.facts.c
    async with database.read() as connection:
        if await connection.run_sync(lambda c: c.dialect.has_table(c, _origin.name)):
            row = (await connection.execute(select(_origin))).first()
            if row is not None:
                at = from_us(row.exported_us)
                return BundleOrigin(row.job, at, at, row.version, row.evidence_missing)
        of_jobs = select(facts.job, func.max(facts.received_us).label("until_us"))
        query = of_jobs.where(facts.job != CLUSTER).group_by(facts.job).limit(1)
        newest = (await connection.execute(query)).first()
    if newest is None:
        return None
    return BundleOrigin(newest.job, None, from_us(newest.until_us), None, None)


def unpack(bundle: Path, database: Path, most_gib: int = 16) -> None:
    """Write the database of a bundle to a file. Raises `BundleError`, also if it is larger.

    SQLite's header says how large the file is: one that has no room is refused before it is
    written, and nothing is written that follows it. A database with more than plain tables is
    refused before anything is asked of it.
    """
    written = size = 0
    try:
        with open_regular(bundle) as packed, database.open("xb") as plain:
            for block in zstandard.ZstdDecompressor().read_to_iter(packed, write_size=1 << 20):
                if not written:
                    size = _checked_size(bundle, block, database.parent, most_gib)
                written += len(block)
                _check_written(bundle, written, size)
                plain.write(block)
    except zstandard.ZstdError as error:
        raise BundleError(f"{bundle} is not a bundle of `everstep export`: {error}") from error
    except OSError as error:
        raise BundleError(f"{bundle} cannot be opened: {error.strerror}") from error
    if not written and not bundle.stat().st_size:
        raise BundleError(f"{bundle} is empty")
    if not written or written != size:
        raise BundleError(f"{bundle} is not whole: its end is missing")
    _refuse_programs(bundle, database)


def _check_written(bundle: Path, written: int, size: int) -> None:
    if written > _RATIO_FROM_BYTES + _MOST_RATIO * bundle.stat().st_size:
        raise BundleError(
            f"{bundle} is not a bundle of `everstep export`: it unpacks to more than "
            f"{_MOST_RATIO} times its size, as a bomb would"
        )
    if written > size:
        raise BundleError(f"{bundle} is not a bundle: more than a database is in it")


_CALLS = frozenset({"Function", "PureFunc"})
_SCHEMA_WITHIN_S = 5.0
_COMPUTED = re.compile(r"\bVIRTUAL\b|\bGENERATED\b|\bAS\s*\(", re.IGNORECASE)


def _refuse_programs(bundle: Path, database: Path) -> None:
    """Raise `BundleError` for what would run when the database is read or written.

    Bundles of every release have plain tables and their indexes only. A view in place of a table
    would hold a reader for ever; a trigger would change what an upgrade writes. A default, a check
    or an index may call functions at each write: they stand in what SQLite would do for one.
    """
    query = "SELECT type, name, coalesce(sql, '') FROM sqlite_master"
    try:
        # SQLite does not read the checks of a database that it cannot write to.
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True)) as connection:
            for pragma in WARY:
                connection.execute(f"PRAGMA {pragma}")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
            until = time.monotonic() + _SCHEMA_WITHIN_S
            connection.set_progress_handler(lambda: time.monotonic() > until, 10_000)
            held = connection.execute(query).fetchall()
            programs = [
                (kind, name)
                for kind, name, sql in held
                if kind not in {"table", "index"} or _COMPUTED.search(sql)
            ]
            for kind, name, _ in held if not programs else ():
                if kind == "table" and not name.startswith("sqlite_"):
                    quoted = '"' + name.replace('"', '""') + '"'
                    steps = connection.execute(f"EXPLAIN INSERT INTO {quoted} DEFAULT VALUES")
                    if any(step[1] in _CALLS for step in steps):
                        programs.append((kind, name))
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
        is_large = isinstance(error, MemoryError) or str(error) == "interrupted"
        why = "its schema is too large" if is_large else " ".join(str(error).split())[:200]
        raise BundleError(f"{bundle} is damaged: {why}") from error
    if programs:
        kind, name = programs[0]
        raise BundleError(
            f"{bundle} is not a bundle of `everstep export`: its database has the {kind} "
            f"{name[:80]!r}, which would run as a program"
        )


def _checked_size(bundle: Path, block: bytes, folder: Path, most_gib: int) -> int:
    """How large the database is, by SQLite's header; a `BundleError` if that cannot be unpacked."""
    if not block.startswith(b"SQLite format 3\0"):
        raise BundleError(f"{bundle} is not a bundle: it holds no database")
    page = int.from_bytes(block[16:18], "big")
    size = (65536 if page == 1 else page) * int.from_bytes(block[28:32], "big")
    if size > most_gib << 30:
        raise BundleError(
            f"{bundle} is too large: it unpacks to {size / (1 << 30):.1f} GiB, and {most_gib} GiB "
            "is the limit: raise it with --max-gib if you trust the file"
        )
    free = shutil.disk_usage(folder).free
    if size > free:
        room = f"{size >> 20} MiB, and {folder} has {free >> 20} MiB"
        raise BundleError(f"{bundle} needs {room}: set TMPDIR to a folder with more room")
    return size


def _remove(plain: Path) -> None:
    for left in (plain, *(plain.with_name(f"{plain.name}-{end}") for end in ("wal", "shm"))):
        with suppress(FileNotFoundError):
            left.unlink()


async def _copy_facts(source: Database, target: Database, job: str) -> int:
    log, copied = FactLog(target, fold), 0
    async for rows in _facts(source, job):
        for received_us, same in itertools.groupby(rows, key=lambda row: row["received_us"]):
            batch = [_new(row) for row in same]
            await log.append(
                STREAM, batch, sequence=int(batch[-1].sequence), received_us=received_us
            )
            copied += len(batch)
    return copied


async def _facts(source: Database, job: str) -> AsyncIterator[list[Record]]:
    """The facts of a job, and those of the cluster about its nodes, in the order of the log."""
    facts, members = tables.facts.c, tables.round_members.c
    async with source.read() as connection:
        query = select(members.node).where(members.job == job).distinct().limit(_NODES_MOST)
        nodes = list((await connection.execute(query)).scalars())
    of_nodes = and_(facts.job == CLUSTER, facts.node.in_(nodes))
    wanted = or_(facts.job == job, of_nodes)
    read_n = 0
    while True:
        query_page = select(tables.facts).where(facts.n > read_n, wanted)
        async with source.read() as connection:
            result = await connection.execute(query_page.order_by(facts.n).limit(_AT_ONCE))
            rows: list[Record] = list(result.mappings().all())
        if not rows:
            return
        yield rows
        read_n = rows[-1]["n"]


def _new(row: Record) -> NewFact:
    body = mask_fact(row["body"])
    return NewFact(
        sequence=row["n"], id=row["id"], job=row["job"], kind=row["kind"], round=row["round"],
        node=row["node"], at_us=row["at_us"], source=row["source"], body=body,
        fact=fact_in(body),
    )  # fmt: skip


async def _copy_blobs(
    source: Database, target: Database, job: str, fetch: Fetch, now_us: int
) -> tuple[int, int]:
    copies, copied, missing, size = EvidenceCopies(target), 0, 0, 0
    for ref in await _references(source, job):
        data, absent = None, _LEFT_OUT
        if size + ref.size_bytes <= _MOST_BYTES:
            try:
                data, absent = await asyncio.to_thread(mask_file, await fetch(ref)), ""
            except (EverstepError, TimeoutError) as error:
                absent = str(error) or "it could not be fetched in time"
        await copies.keep(ref, data, absent=absent or None, now_us=now_us)
        copied, missing = copied + (data is not None), missing + (data is None)
        size += 0 if data is None else len(data)
    return copied, missing


async def _references(source: Database, job: str) -> list[BlobRef]:
    """The blobs that a job's facts refer to, each once."""
    refs: dict[str, BlobRef] = {}
    for table, column in ((tables.rank_exits, "log"), (tables.evidence, "blob")):
        blob = table.c[column]
        query = select(blob).where(table.c.job == job, blob.is_not(None)).order_by(table.c.n)
        async with source.read() as connection:
            texts: Iterable[str] = (await connection.execute(query)).scalars().all()
        for text in texts:
            with suppress(msgspec.DecodeError, ValueError):
                ref = msgspec.json.decode(text, type=BlobRef)
                refs.setdefault(ref.id, ref)
    return list(refs.values())


def _pack(plain: Path, file: Path) -> None:
    with plain.open("rb") as source, file.open("xb") as packed:
        zstandard.ZstdCompressor(level=6, write_checksum=True).copy_stream(source, packed)
