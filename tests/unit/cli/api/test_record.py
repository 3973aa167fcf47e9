"""The record on disk answers without a service, and nothing about it changes."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.store.database import open_database
from everstep.store.errors import ReadOnlyError
from everstep.store.record_file import RecordFile
from everstep.store.schema import upgrade
from everstep_services.cli.api.record import newest_record, record_api
from everstep_services.cli.errors import CliError, Exit


def write(path: Path) -> None:
    """A database with its schema, and nothing in it."""

    async def run() -> None:
        async with open_database(f"sqlite:///{path}") as database:
            await upgrade(database)

    path.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The database of a state directory whose service has ended."""
    path = tmp_path / "history.db"
    write(path)
    before = contents(tmp_path)
    yield path
    assert contents(tmp_path).keys() == before.keys()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_it_answers_and_changes_no_byte(path: Path) -> None:
    before = contents(path.parent)
    api, status = record_api(path, timeout_s=60)
    with api:
        assert api.get("jobs")["items"] == []
        assert api.get("status")["is_bus_connected"] is False
        with pytest.raises(CliError) as error:
            api.get("jobs/nobody")
    assert error.value.code is Exit.NOT_FOUND
    assert (status.unprojected, status.unsent_bytes, api.is_record) == (0, 0, True)
    assert contents(path.parent) == before


def test_what_only_a_service_can_do_is_refused(path: Path) -> None:
    api, _ = record_api(path, timeout_s=60)
    with api:
        for ask in (
            lambda: api.post("control", {}),
            lambda: list(api.stream("facts/stream", {}, None)),
        ):
            with pytest.raises(CliError, match="everstep up") as error:
                ask()
            assert error.value.code is Exit.UNREACHABLE


def test_a_writer_that_is_at_work_is_read_along_with(tmp_path: Path) -> None:
    """Also one that comes after the file was opened as complete."""
    path = tmp_path / "history.db"
    write(path)
    api, _ = record_api(path, timeout_s=60)
    with api:
        assert api.get("status")["last_n"] == 0
        writer = sqlite3.connect(path, isolation_level=None)
        try:
            writer.execute("UPDATE meta SET last_n = 7")
            assert api.get("status")["last_n"] == 7
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("UPDATE meta SET last_n = 8")
            assert api.get("status")["last_n"] == 7
            writer.execute("COMMIT")
            assert api.get("status")["last_n"] == 8
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            writer.close()
    fresh, status = record_api(path, timeout_s=60)
    fresh.__exit__(None, None, None)
    assert status.unprojected == 8


def test_facts_that_wait_in_spools_are_counted(path: Path) -> None:
    spool = path.parent / "spool" / "agent"
    spool.mkdir(parents=True)
    (spool / "0000000001.seg").write_bytes(b"x" * 100)
    api, status = record_api(path, timeout_s=60)
    api.__exit__(None, None, None)
    assert status.unsent_bytes == 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "install the newer everstep"),
        ("UPDATE meta SET projection = 100000", "install the newer everstep"),
        ("UPDATE meta SET projection = 0", "written by an older version"),
        ("DROP TABLE alembic_version", "nothing was ever recorded"),
    ],
)
def test_another_version_is_refused_in_one_line(tmp_path: Path, change: str, said: str) -> None:
    path = tmp_path / "history.db"
    write(path)
    with sqlite3.connect(path) as database:
        database.execute(change)
    database.close()
    with pytest.raises(CliError, match=said) as error:
        record_api(path, timeout_s=60)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"no database at all" * 100, b"SQLite format 3\0"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "history.db"
    path.write_bytes(data)
    with pytest.raises(CliError, match="history.db") as error:
        record_api(path, timeout_s=60)
    assert "\n" not in str(error.value)


def test_the_newest_record_is_taken(tmp_path: Path) -> None:
    assert newest_record(tmp_path) is None
    write(tmp_path / "history.db")
    assert newest_record(tmp_path) == tmp_path / "history.db"
    write(tmp_path / "jobs" / "second" / "history.db")
    assert newest_record(tmp_path) == tmp_path / "jobs" / "second" / "history.db"


def test_nothing_can_be_written(path: Path) -> None:
    with pytest.raises(ReadOnlyError):
        RecordFile(path).write()
