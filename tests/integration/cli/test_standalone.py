"""The services of `everstep run` without a bus of its own fail, and come back where they were."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from everstep.clock import SystemClock
from everstep.observe.http import listen
from everstep.runtime import DrainTimeoutError
from everstep.settings import load
from everstep_services.cli.machine.state import StateDir
from everstep_services.cli.stack import standalone
from everstep_services.cli.stack.phases import Phases
from everstep_services.cli.stack.services import stack_sections
from everstep_services.cli.stack.standalone import _keep
from everstep_services.cli.stack.supervisor import Ready, StackPlan
from everstep_services.history.api.http.auth import TokenAuth

WITHIN_S = 120
pytestmark = pytest.mark.timeout(300)  # all services are started twice


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[StackPlan]:
    state = StateDir(tmp_path / "state")
    state.create()
    with listen("127.0.0.1", 0, remedy="") as api, listen("127.0.0.1", 0, remedy="") as observe:
        settings = load(stack_sections(), files=[], environ={})
        yield StackPlan(state, settings, api, observe, Phases(SystemClock()), command="run")


def test_services_that_fail_come_back_on_the_same_port(
    ground: StackPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TokenAuth.write_used_for_ever

    async def follow() -> None:
        stop, fail = asyncio.Event(), asyncio.Event()
        told: asyncio.Queue[Ready] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def fails_once(gate: TokenAuth) -> None:
            if not fail.is_set():
                await fail.wait()
                raise RuntimeError("a bug")
            await plain(gate)

        def tell(ready: Ready) -> None:
            loop.call_soon_threadsafe(told.put_nowait, ready)

        monkeypatch.setattr(TokenAuth, "write_used_for_ever", fails_once)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_keep(ground, stop, tell, lambda _: None))
            addresses = []
            try:
                for _ in range(2):
                    async with asyncio.timeout(WITHIN_S):
                        running = (await told.get()).running
                    addresses.append((running.api, running.observe))
                    for url in (f"{running.api}/api/v1/status", f"{running.observe}/livez"):
                        async with httpx2.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
                            assert (await client.get(url)).status_code in {200, 401}
                    fail.set()
            finally:
                stop.set()
        assert addresses[0] == addresses[1]

    asyncio.run(follow())


async def test_services_that_are_cut_off_after_the_job_are_one_line(
    ground: StackPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver of messages that takes none must not end a job with a traceback."""
    stop = asyncio.Event()

    async def cut_off(*_: object) -> None:
        stop.set()
        late = DrainTimeoutError(["notify"], 12.0)
        raise ExceptionGroup("of tasks", [ExceptionGroup("of a task", [late])])

    monkeypatch.setattr(standalone, "run_stack", cut_off)
    await _keep(ground, stop, lambda _: None, lambda _: None)
    (record,) = [one for one in caplog.records if one.name == standalone.__name__]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "notify did not finish within 12 s" in record.getMessage()
