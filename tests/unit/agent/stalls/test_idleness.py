"""Which processes do nothing, asked of the kernel about real ones."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from everstep.clock import SystemClock
from everstep_services.agent.stalls.idleness import Idleness

_SLEEPER = "import sys; print(flush=True); sys.stdin.read()"
_WORKER = (
    "import sys\nprint(flush=True)\nfor line in sys.stdin: print(sum(range(10**7)), flush=True)"
)


class Moved(SystemClock):
    """A clock that a test moves."""

    at = 1000.0

    def now(self) -> float:
        return self.at

    def move(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def clock() -> Moved:
    return Moved()


@pytest.fixture
def start() -> "Iterator[object]":
    started: list[subprocess.Popen[bytes]] = []

    def make(code: str) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


def test_what_sleeps_is_idle_and_what_works_is_not(start, clock: Moved) -> None:  # type: ignore[no-untyped-def]
    sleeper, worker = start(_SLEEPER), start(_WORKER)
    idleness, pids = Idleness(clock), {0: sleeper.pid, 1: worker.pid}
    assert idleness.look(pids) == {0: 0.0, 1: 0.0}
    clock.move(10)
    worker.stdin.write(b"go\n")
    worker.stdin.flush()
    worker.stdout.readline()
    assert idleness.look(pids) == {0: 10.0, 1: 0.0}


def test_what_we_have_made_it_work_does_not_count(start, clock: Moved) -> None:  # type: ignore[no-untyped-def]
    worker, idleness = start(_WORKER), Idleness(clock)
    pids = {0: worker.pid}
    idleness.look(pids)
    for step in range(1, 3):
        clock.move(10)
        assert idleness.look(pids) == {0: 10.0 * step}
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
        worker.stdout.readline()
        idleness.overlook(0)


def test_another_process_of_the_same_rank_begins_anew(start, clock: Moved) -> None:  # type: ignore[no-untyped-def]
    idleness = Idleness(clock)
    idleness.look({0: start(_SLEEPER).pid})
    clock.move(10)
    assert idleness.look({0: start(_SLEEPER).pid}) == {0: 0.0}


def test_a_process_that_is_gone_is_not_idle(start, clock: Moved) -> None:  # type: ignore[no-untyped-def]
    process, idleness = start(_SLEEPER), Idleness(clock)
    idleness.look({0: process.pid})
    process.kill()
    process.wait()
    assert idleness.look({0: process.pid}) == {}
