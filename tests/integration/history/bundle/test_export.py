"""A job's history as one file: written over REST, and read again without a service."""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import zstandard
from msgspec.structs import replace
from sqlalchemy import text

from everstep.messages import BlobRef, RankExited
from everstep.store.database import StoreLimits, open_database
from everstep.store.errors import QueryTooLongError, StoreError
from everstep.store.evidence_copies import EvidenceCopies, EvidenceCopy
from everstep.store.queries import log_head
from everstep.store.record_file import RecordFile
from everstep.store.schema import upgrade
from everstep.subjects import CLUSTER
from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit
from everstep_services.history.bundle import BundleError, _pack, unpack
from tests.integration.conftest import Api
from tests.integration.history.test_rest_incidents import problem
from tests.integration.history.test_rest_lists import get
from tests.unit.history.facts import make
from tests.unit.history.story import INCIDENT, JOB, whole


async def exported(reader: httpx2.AsyncClient, folder: Path, job: str = JOB) -> Path:
    answer = await reader.get(f"jobs/{job}/export")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/zstd"
    assert f'filename="{job}.everstep"' in answer.headers["content-disposition"]
    file = folder / "file.everstep"
    file.write_bytes(answer.content)
    return file


async def test_a_bundle_answers_as_the_service_did(
    api: Api, reader: httpx2.AsyncClient, tmp_path: Path
) -> None:
    """Each fact of the job is in it, and none of another job (A11.2)."""
    await api.add(*whole(), make("job_started", job="other"))
    bundle = await exported(reader, tmp_path)
    database = tmp_path / "unpacked.db"
    await asyncio.to_thread(unpack, bundle, database)
    record = RecordFile(database)
    try:
        await record.check()
        there = Api(record, api.fact_log, api.clock)
        await there.open()
        asked = (f"jobs/{JOB}", f"jobs/{JOB}/rounds", f"incidents/{INCIDENT}")
        before = [await get(reader, path) for path in asked]
        async with reader_of(there) as offline:
            assert [bare(await get(offline, path)) for path in asked] == list(map(bare, before))
            facts = (await get(offline, "facts", limit=1000))["items"]
            assert (await get(offline, "jobs"))["items"][0]["job"] == JOB
    finally:
        await record.close()
    known = (await get(reader, "facts", job=JOB, limit=1000))["items"]
    assert [fact["id"] for fact in facts if fact["job"] == JOB] == [fact["id"] for fact in known]
    assert {fact["job"] for fact in facts} <= {JOB, CLUSTER}


def reader_of(api: Api) -> httpx2.AsyncClient:
    """A client of endpoints that admit everybody: nobody can write a token into a record."""
    from everstep_services.cli.api.record import _admitted
    from everstep_services.history.api.app import create_api

    transport = httpx2.ASGITransport(app=_admitted(create_api(api.context)))
    return httpx2.AsyncClient(transport=transport, base_url="http://bundle/api/v1")


def bare(answer: object) -> object:
    """An answer without places in the log: facts of other jobs are not in a bundle."""
    if isinstance(answer, dict):
        return {
            name: bare(value)
            for name, value in answer.items()
            if name not in {"n", "first_n", "last_n", "next"}
        }
    return [bare(one) for one in answer] if isinstance(answer, list) else answer


async def test_evidence_is_in_it_and_what_is_gone_says_why(
    api: Api, reader: httpx2.AsyncClient, tmp_path: Path
) -> None:
    there = await api.bus.blobs.put(JOB, b"the end of a log")
    gone = replace(there, id="f" * 32)
    await api.add(
        make("round_formed", job=JOB, round=1), exit_of(1, there), exit_of(2, gone),
    )  # fmt: skip
    database = tmp_path / "unpacked.db"
    await asyncio.to_thread(unpack, await exported(reader, tmp_path), database)
    async with open_database(f"sqlite:///{database}") as opened:
        copies = EvidenceCopies(opened)
        kept, missing = await copies.find(there.id), await copies.find(gone.id)
    assert kept is not None
    assert kept.data == b"the end of a log"
    assert missing is not None
    assert missing.data is None
    assert missing.absent


def exit_of(rank: int, log: BlobRef) -> RankExited:
    fact = make("rank_exited", job=JOB, round=1, rank=rank, log=log)
    assert isinstance(fact, RankExited)
    return fact


async def test_facts_of_the_cluster_about_nodes_of_the_job_are_in_it(
    api: Api, reader: httpx2.AsyncClient, tmp_path: Path
) -> None:
    formed = make("round_formed", job=JOB, round=1)
    mine = formed.members[0].node  # type: ignore[attr-defined]
    await api.add(
        formed,
        make("node_excluded", job=CLUSTER, node=mine, round=None),
        make("node_excluded", job=CLUSTER, node="stranger", round=None),
    )
    database = tmp_path / "unpacked.db"
    await asyncio.to_thread(unpack, await exported(reader, tmp_path), database)
    async with open_database(f"sqlite:///{database}") as opened:
        assert (await log_head(opened)).last_n == 2


async def test_one_bundle_is_written_at_a_time(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*whole())
    answers = await asyncio.gather(*(reader.get(f"jobs/{JOB}/export") for _ in range(4)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert set(codes) <= {200, 503}
    assert (await problem(reader, "jobs/nobody/export"))[:2] == (404, "not_found")


def sqlite(*, pages: int, then: bytes) -> bytes:
    """The header of a database with this number of pages of 4 KiB, and what follows it."""
    head = b"SQLite format 3\0" + (4096).to_bytes(2, "big") + bytes(10) + pages.to_bytes(4, "big")
    return head + then


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"no bundle at all", "is not a bundle"),
        (zstandard.compress(b"text" * 1000), "holds no database"),
        (zstandard.compress(sqlite(pages=2, then=b"x" * 4000)), "is not whole"),
        (zstandard.compress(sqlite(pages=1, then=bytes(1 << 24))), "more than a database"),
        (zstandard.compress(sqlite(pages=0xFFFFFF00, then=b"")), "too large"),
        (zstandard.compress(sqlite(pages=1 << 15, then=bytes(100 << 20))), "as a bomb would"),
    ],
)
def test_what_is_not_a_bundle_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    """A13.3."""
    file = tmp_path / "bad.everstep"
    file.write_bytes(content)
    with pytest.raises(BundleError, match=said):
        unpack(file, tmp_path / "unpacked.db", 16)


async def make_database(plain: Path) -> None:
    async with open_database(f"sqlite:///{plain}") as database:
        await upgrade(database)


@pytest.mark.parametrize(
    "attack",
    [
        "CREATE VIEW mine AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n FROM r) "
        "SELECT * FROM r",
        "CREATE TRIGGER t AFTER INSERT ON tokens BEGIN DELETE FROM facts; END",
        "CREATE VIRTUAL TABLE mine USING fts5(a)",
        "CREATE TABLE mine (a INT, b BLOB GENERATED ALWAYS AS (zeroblob(1000000000)))",
        "CREATE TABLE mine (a INT, b BLOB AS(hex(zeroblob(100000000))))",
        "CREATE TABLE mine (a INT, b BLOB DEFAULT (zeroblob(1000000000)))",
        "CREATE TABLE mine (a INT, CHECK (length(hex(zeroblob(400000000))) > a))",
        "CREATE INDEX mine ON facts (hex(zeroblob(400000000)))",
        "CREATE INDEX mine ON facts (job) WHERE length(zeroblob(1000000000)) > 1",
        "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = 'CREATE TABLE facts(' "
        "WHERE name = 'facts'",
        "PRAGMA writable_schema=ON; UPDATE sqlite_master SET type = 'trigger', name = 'x' || x'00' "
        "WHERE name = 'facts'",
        "PRAGMA writable_schema=ON; UPDATE sqlite_master "
        "SET sql = CAST(CAST(sql AS BLOB) || x'2d2dff' AS TEXT) WHERE name = 'facts'",
        "PRAGMA writable_schema=ON; UPDATE sqlite_master "
        "SET sql = 'CREATE TABLE facts(', name = CAST(x'ff' AS TEXT) WHERE name = 'facts'",
    ],
)  # fmt: skip
def test_a_database_that_would_run_something_is_refused(tmp_path: Path, attack: str) -> None:
    """A bundle may come from anywhere: nothing in it runs when it is opened, read or upgraded."""
    plain, file = tmp_path / "h.db", tmp_path / "bad.everstep"
    asyncio.run(make_database(plain))
    _pack(plain, file)
    unpack(file, tmp_path / "good.db", 16)
    file.unlink()
    with closing(sqlite3.connect(plain)) as connection:
        connection.executescript(attack)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _pack(plain, file)
    with pytest.raises(BundleError, match=r"as a program|is damaged") as refused:
        unpack(file, tmp_path / "unpacked.db", 16)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "attack",
    [
        "CREATE TABLE a (x REFERENCES b); DROP TABLE tokens; CREATE TABLE tokens (id TEXT, name, "
        "scope, secret_sha256, created_us, expires_us, last_used_us, revoked_us, "
        "FOREIGN KEY (id) REFERENCES tokens (name))",
        "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage = "
        "(SELECT rootpage FROM sqlite_master WHERE name = 'tokens') WHERE name = 'alembic_version'",
        "DROP TABLE meta; CREATE TABLE meta (one, projection)",
        "INSERT INTO alembic_version VALUES ('0001'), ('0002')",
    ],
)
def test_a_database_of_another_shape_is_one_line(
    tmp_path: Path, attack: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, file = tmp_path / "h.db", tmp_path / "bad.everstep"
    asyncio.run(make_database(plain))
    with closing(sqlite3.connect(plain)) as connection:
        connection.executescript(attack)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _pack(plain, file)
    assert main(["serve", "--bundle", str(file), "--port", "0"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert str(file) in said
    assert said.count("\n") == 1


def test_a_schema_that_takes_long_to_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MB of it held `everstep serve` for ever."""
    monkeypatch.setattr("everstep_services.history.bundle._SCHEMA_WITHIN_S", 0.0)
    plain, file = tmp_path / "h.db", tmp_path / "bad.everstep"
    with closing(sqlite3.connect(plain)) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.execute("PRAGMA writable_schema=ON")
        rows = ((f"t{number}", f"CREATE TABLE t{number} (a)") for number in range(5000))
        connection.executemany("INSERT INTO sqlite_master VALUES ('table', ?1, ?1, 2, ?2)", rows)
        connection.commit()
    _pack(plain, file)
    with pytest.raises(BundleError, match="its schema is too large"):
        unpack(file, tmp_path / "unpacked.db", 16)


def test_a_bomb_in_place_of_evidence_is_not_unpacked(tmp_path: Path) -> None:
    async def found() -> EvidenceCopy | None:
        async with open_database(f"sqlite:///{tmp_path / 'h.db'}") as opened:
            await upgrade(opened)
            copies = EvidenceCopies(opened)
            ref = BlobRef(job=JOB, id="0" * 32, size_bytes=1, parts=1)
            await copies.keep(ref, bytes(33 << 20), absent=None, now_us=1)
            return await copies.find(ref.id)

    assert asyncio.run(found()) == EvidenceCopy(None, "its copy in the database is damaged")


def test_a_record_from_elsewhere_holds_nobody_and_fills_no_memory(tmp_path: Path) -> None:
    plain = tmp_path / "h.db"
    asyncio.run(make_database(plain))
    with closing(sqlite3.connect(plain)) as connection:
        connection.executescript(
            "CREATE VIEW long AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n FROM r) "
            "SELECT count(*) FROM r; CREATE VIEW large AS SELECT zeroblob(70000000) AS a"
        )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def ask(view: str) -> None:
        record = RecordFile(plain, StoreLimits(readers=1, read_within_s=0.2))
        try:
            async with record.read() as opened:
                await opened.execute(text(f"SELECT * FROM {view}"))
        finally:
            await record.close()

    with pytest.raises(QueryTooLongError):
        asyncio.run(ask("long"))
    with pytest.raises(StoreError, match="too big"):
        asyncio.run(ask("large"))


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_a_record_of_files_that_are_none_is_refused(
    tmp_path: Path, end: str, put: Callable[[Path], object]
) -> None:
    (tmp_path / "h.db-wal").touch()  # for which SQLite looks at the other files
    odd = tmp_path / f"h.db{end}"
    odd.unlink(missing_ok=True)
    put(odd)
    with pytest.raises(StoreError, match=f"{odd} is not a regular file"):
        RecordFile(tmp_path / "h.db")


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_links_and_logs_next_to_a_record_change_no_other_file(tmp_path: Path, end: str) -> None:
    plain, other = tmp_path / "h.db", tmp_path / "other"
    asyncio.run(make_database(plain))
    other.write_bytes(b"not of SQLite")
    (tmp_path / "h.db-wal").touch()
    odd = tmp_path / f"h.db{end}"
    odd.unlink(missing_ok=True)
    odd.symlink_to(other)

    async def check() -> None:
        record = RecordFile(plain)
        try:
            await record.check()
        finally:
            await record.close()

    with contextlib.suppress(StoreError):
        asyncio.run(check())
    assert other.read_bytes() == b"not of SQLite"


def test_the_limit_of_a_bundle_is_an_option(tmp_path: Path) -> None:
    """A larger one is refused with the option's name, before anything is written (A13.3)."""
    file = tmp_path / "large.everstep"
    file.write_bytes(zstandard.compress(sqlite(pages=1 << 19, then=b"")))
    with pytest.raises(
        BundleError, match="2.0 GiB, and 1 GiB is the limit: raise it with --max-gib"
    ):
        unpack(file, tmp_path / "unpacked.db", 1)
    with pytest.raises(BundleError, match="is not whole"):
        unpack(file, tmp_path / "another.db", 2)


def test_a_bundle_for_which_there_is_no_room_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header says how large it is (A13.3)."""
    file = tmp_path / "large.everstep"
    file.write_bytes(zstandard.compress(sqlite(pages=1 << 20, then=b"")))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(BundleError, match="needs 4096 MiB, and .* has 1024 MiB: set TMPDIR"):
        unpack(file, tmp_path / "unpacked.db", 16)
    assert not (tmp_path / "unpacked.db").stat().st_size
