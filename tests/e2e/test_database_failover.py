"""PostgreSQL's primary is killed, and its standby promoted: that is the database from then on."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.store.database import open_database
from everstep.store.errors import DatabaseAwayError
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from tests.e2e.control_planes import Pieces
from tests.e2e.postgres import Postgres
from tests.integration.bus.facts import ended
from tests.waiting import until_async

log = logging.getLogger(__name__)
EVERY_S = 0.02


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """A primary, and a standby that follows it."""
    # Not below pytest's own folder: see the fixture `postgres`.
    primary = Postgres(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
    try:
        standby = primary.standby(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
        try:
            yield primary, standby
        finally:
            standby.stop()
    finally:
        primary.stop()


def url(*servers: Postgres) -> str:
    hosts = "&".join(f"host={server.socket}:5432" for server in servers)
    return f"postgresql://postgres@/postgres?{hosts}&target_session_attrs=read-write"


@pytest.mark.chaos
async def test_the_promoted_standby_is_written_and_read(pair: tuple[Postgres, Postgres]) -> None:
    """Connections that only read refuse to write, and are no standby for that."""
    primary, standby = pair
    async with open_database(url(primary, standby)) as database:
        for transaction in (database.write, database.read):
            async with transaction() as connection:
                await connection.exec_driver_sql("SELECT 1")
        await asyncio.to_thread(primary.kill)
        async with open_database(url(standby, standby)) as followers:
            with pytest.raises(DatabaseAwayError, match="promote the standby"):
                async with followers.write():
                    pass
        await asyncio.to_thread(standby.promote)
        for transaction in (database.write, database.read):
            async with transaction() as connection:
                found = await connection.exec_driver_sql("SELECT pg_is_in_recovery()")
                assert found.scalar() is False


class Recorder:
    """Records facts that can be told apart, and sees which of them REST has."""

    def __init__(self, pieces: Pieces, job: str) -> None:
        self._pieces = pieces
        self._job = job
        self.sent = 0
        self.is_over = False

    async def record_for_ever(self, spool: Path) -> None:
        settings = BusSettings(
            url=f"nats://127.0.0.1:{self._pieces._port}",
            credentials_file=self._pieces.login_file(SERVICE),
        )
        async with connect(settings, "recorder", spool=spool) as bus:
            while not self.is_over:
                await bus.record(msgspec.structs.replace(ended(self.sent), job=self._job))
                self.sent += 1
                await asyncio.sleep(EVERY_S)
            await bus.flush(60)

    async def numbers(self, most: int | None) -> list[int]:
        """Of the newest facts in REST, the newest first."""
        return await asyncio.to_thread(self._numbers, most)

    def _numbers(self, most: int | None) -> list[int]:
        of_job = {"job": self._job, "kind": "job_ended", "order": "desc"}
        with Api(self._pieces.api, self._pieces.token) as api:
            return [
                fact["body"].get("exit_code", 0) for fact in api.pages("facts", of_job, most=most)
            ]

    async def shows(self, number: int) -> None:
        """Return once REST has this fact or a later one."""
        await until_async(
            lambda: self.numbers(1), f"REST has fact {number}",
            holds=lambda newest: newest and newest[0] >= number, despite=(CliError,),
        )  # fmt: skip


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lags", [False, True])
async def test_history_goes_on_with_the_promoted_standby(
    pair: tuple[Postgres, Postgres], tmp_path: Path, job: str, lags: bool
) -> None:
    """Each fact once: what a standby that lags never got is read from the stream again."""
    primary, standby = pair
    pieces = Pieces(tmp_path, EVERSTEP_HISTORY__DATABASE_URL=url(primary, standby))
    recorder = Recorder(pieces, job)
    try:
        await asyncio.to_thread(pieces.start)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(recorder.record_for_ever(tmp_path / "spool"))
            await recorder.shows(50)
            if lags:
                await asyncio.to_thread(standby.cut_off, primary)
            await recorder.shows(recorder.sent + 50)
            await asyncio.to_thread(primary.kill)
            killed_at = time.monotonic()
            await asyncio.to_thread(standby.promote)
            promoted_at = time.monotonic()
            await recorder.shows(recorder.sent)
            now = time.monotonic()
            took_s = (promoted_at - killed_at, now - promoted_at)
            log.info("promoted after %.1f s, history back %.1f s later", *took_s)
            recorder.is_over = True
        await recorder.shows(recorder.sent - 1)
        assert await recorder.numbers(None) == list(range(recorder.sent))[::-1]
    finally:
        await asyncio.to_thread(pieces.stop)
