"""What every test may use: a real NATS server, a job's name, and two guards."""

import asyncio
import faulthandler
import gc
import inspect
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.roles import ADMIN
from everstep.bus.server.config import ServerPlan
from everstep.bus.server.dev_server import DevServer, dev_server, find_program
from everstep.settings import secrets
from tests.e2e import failure_logs, lifeline
from tests.fakes.clock import FakeClock
from tests.waiting import WITHIN_S
from trainer_sdk import sdk_log

# How long an example takes says more about the machine than about the code.
settings.register_profile("chaos", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("chaos"), derandomize=True)
settings.load_profile("steady")  # `make test-all` looks for new examples

CONFIGURED_LOGGER = sdk_log._configured_logger
# pytest hears all of `logging`; tests read what a script has on stderr that has not configured it.
sdk_log._configured_logger = lambda: None

_COLLECT_AFTER = gc.get_threshold()
"""Taken before any service runs: one that serves a whole module changes it before its tests."""

_MANY_OPEN = 256
"""With more open files than that, some are those of tests that are over."""

_IGNORED = pytest.StashKey[list[int]]()
_LAST_WORDS = pytest.StashKey[Path]()
_OWN_FOLDER = pytest.StashKey[Path]()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """For tests that configure it as a command does: its stream is closed with their output."""
    loggers = [logging.root, logging.getLogger("everstep.observe.metrics")]
    handlers, levels = logging.root.handlers[:], [logger.level for logger in loggers]
    yield
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.hookimpl(trylast=True)  # after pytest's own, which says it far from the summary
def pytest_configure(config: pytest.Config) -> None:
    """Where a process that runs tests says what it was doing when it crashed."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        usual = (signal.SIGHUP, signal.SIGINT)
        ignored: list[int] = [n for n in usual if signal.getsignal(n) is signal.SIG_IGN]
        config.stash[_IGNORED] = ignored
        lifeline.end_with_this_process()
        config.stash[_LAST_WORDS] = Path(tempfile.mkdtemp(prefix="everstep-tests-"))
    else:
        words = Path(worker["last_words"], worker["workerid"])
        faulthandler.enable(words.open("w"))
        config.stash[_IGNORED] = worker["ignored"]
    for number in config.stash[_IGNORED]:
        signal.signal(number, _hear_nothing)


def _hear_nothing(_: int, __: object) -> None:
    """A run under `nohup`, or in the background, ignores signals; what it starts must not."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and all that they import stay until the end: nobody looks for garbage in them."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return collected


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of xdist, before a process begins."""
    node.workerinput["last_words"] = str(node.config.stash[_LAST_WORDS])
    node.workerinput["ignored"] = [int(number) for number in node.config.stash[_IGNORED]]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for words in sorted(config.stash[_LAST_WORDS].iterdir()):
        if words.stat().st_size:
            terminalreporter.section(f"last words of {words.name}")
            terminalreporter.write_line(words.read_text())
    shutil.rmtree(config.stash[_LAST_WORDS])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Know the folder of a test also if its next fixture fails."""
    made = yield
    if fixturedef.argname == "tmp_path" and isinstance(made, Path):
        request.node.stash[_OWN_FOLDER] = made
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        if call.excinfo is not None:
            report.sections += failure_logs.output(call.excinfo.value)
        fixtures = getattr(item, "fixturenames", ())
        report.sections += failure_logs.ends(item.stash.get(_OWN_FOLDER, None), fixtures)
    return report


@pytest.fixture(autouse=True)
def _forgets_secrets() -> Iterator[None]:
    """Secrets that a test has read are masked in its own texts only, not in those of the next."""
    before = secrets._known.copy()
    yield
    secrets._known.intersection_update(before)


@pytest.fixture(autouse=True)
def no_blocking_call_in_the_loop(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """`time.sleep`, file and socket calls raise when our code makes them on the loop."""
    if not inspect.iscoroutinefunction(request.function):
        yield
        return
    with blockbuster_ctx(["everstep", "everstep_services"]) as guard:
        guard.functions["os.stat"].deactivate()  # what pathlib asks of a local disk
        yield


@pytest.fixture(autouse=True)
async def no_task_outlives_its_test() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:  # a server's own tasks end a little after it was closed
        _, left = await asyncio.wait(left, timeout=WITHIN_S)
    assert not left, f"still running: {sorted(str(task) for task in left)}"


@pytest.fixture(scope="session", autouse=True)
def patient_buses() -> Iterator[None]:
    """All users of our servers wait for them as long as a test does for anything."""
    plain = DevServer.settings

    def settings(server: DevServer, role: str, job: str | None = None) -> BusSettings:
        found = plain(server, role, job)
        return msgspec.structs.replace(found, connect_within_s=WITHIN_S, request_within_s=WITHIN_S)

    with patch.object(DevServer, "settings", settings):
        yield


@pytest.fixture
def job() -> str:
    """A name of the test's own: subjects hold it, so tests never hear each other."""
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """One real server for all tests that leave it as it is; set up, with streams and buckets."""
    folder: Path = tmp_path_factory.mktemp("shared-nats")
    server = DevServer(
        find_program(), folder, ServerPlan(store=folder / "store", port=-1, log_folder=folder)
    )

    async def start() -> None:
        await server.start()
        async with connect(server.settings(ADMIN), "setup") as bus:
            await topology.init(bus.jetstream)

    with failure_logs.shared("shared_nats", folder), asyncio.Runner() as runner:
        runner.run(start())
        yield server
        runner.run(server.stop())


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[DevServer]:
    """A server of the test's own, to kill, wipe or grant on; not yet set up."""
    async with dev_server(tmp_path / "own-nats") as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _freezes_no_more() -> Iterator[None]:
    """A service in the test's process would keep its garbage for ever."""
    with patch.object(gc, "freeze"):
        yield


@pytest.fixture(autouse=True)
def _collects_as_before() -> Iterator[None]:
    """A service in the test's process has it collect garbage less often."""
    yield
    gc.enable()
    gc.set_threshold(*_COLLECT_AFTER)
    if len(os.listdir("/proc/self/fd")) > _MANY_OPEN:
        gc.collect()  # in a large process a full collection is rare, and pages wait for it
