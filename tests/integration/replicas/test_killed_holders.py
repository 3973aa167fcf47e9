"""A killed holder of a lock, a lease or a place keeps nobody out for long (A9.4)."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.bus.leader_election import Term, lead_for_ever
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.protocol import Copy, PutCopy, SendFrom
from tests.fakes import bus as fakes
from tests.fakes.clock import FakeClock
from tests.integration.replicas.nodes import made, order, running, save_image, state_of
from trainer_sdk.checkpoint.manifest import encode

LOCKS = {
    "images of a rank": "from trainer_sdk.checkpoint.save.buffers import Arena; Arena(2, folder)",
    "images of a node": (
        "from everstep_services.agent.replicas.state_folder import opened_images\n"
        "held = opened_images('j', 'n1', Path(folder)); assert held.__enter__()"
    ),
    "runtime folder": (
        "from everstep_services.agent.ranks.setup import hold; hold(Path(folder) / 'agent')"
    ),
    "folder of agents": (
        "from everstep_services.agent.ranks.process_tree import alone_in\n"
        "held = alone_in(Path(folder)); held.__enter__()"
    ),
    "spool": "from everstep.bus.facts.spool import Spool; held = Spool.open(Path(folder))",
    "state directory": (
        "from everstep_services.cli.machine.state import StateDir\n"
        "state = StateDir(Path(folder)); state.create(); held = state.held(); held.__enter__()"
    ),
}
"""What takes each, as this user's processes do, and fails if another has it."""
FORKS = """
if not os.fork():
    signal.pause()
"""
STARTS = """
import subprocess
subprocess.Popen(["sleep", "1000000"])
"""
SAYS = """
os.write(1, b"held")
signal.pause()
"""


@contextmanager
def process(code: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """With all that it starts in a group, which is gone afterwards."""
    before = "import os, signal, sys\nfrom pathlib import Path\nfolder = sys.argv[1]\n"
    one = subprocess.Popen(
        [sys.executable, "-c", before + code, str(folder)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield one
    finally:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def said(one: "subprocess.Popen[bytes]") -> bytes:
    assert one.stdout is not None
    return os.read(one.stdout.fileno(), 4)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_is_free_when_its_holder_is_killed_whatever_that_has_started(
    tmp_path: Path, lock: str
) -> None:
    children = FORKS if lock == "images of a rank" else STARTS  # a data loader has forks
    with process(LOCKS[lock] + children + SAYS, tmp_path) as first:
        assert said(first) == b"held"
        first.kill()
        first.wait()
        with process(LOCKS[lock] + SAYS, tmp_path) as second:
            assert said(second) == b"held"


async def test_a_lease_is_taken_over_once_it_has_run_out_and_been_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10 s that it lives, by the server's clock, and a third of that between two questions."""
    clock = FakeClock()
    monkeypatch.setattr(fakes, "_now", clock.now)
    bus = fakes.MemoryBus(fakes.MemoryServer())
    led: list[float] = []

    async def work(_: Term) -> None:
        led.append(clock.now())
        await asyncio.Event().wait()

    assert await bus.leases.acquire("catalog", "killed", 10)
    begun = clock.now()
    async with asyncio.TaskGroup() as tasks:
        leading = tasks.create_task(lead_for_ever(bus, clock, "catalog", work))
        await clock.advance(9.9)
        assert not led
        await clock.advance(10 / 3 + 0.2)
        leading.cancel()
    assert len(led) == 1
    assert led[0] - begun <= 10 + 10 / 3


async def test_the_next_holder_of_a_slot_does_not_wait_for_one_that_is_cut_off(
    tmp_path: Path,
) -> None:
    """It had begun to send, and its node is gone without a word: the keeper waits for more."""
    patient = CheckpointSettings(room_least_bytes=0, silent_s=1e6, least_mib_s=1e-6)
    cut_off, one = made("one", tmp_path / "cut-off", patient), made("one", tmp_path / "one")
    other = made("other", tmp_path / "other", patient)
    index = save_image(cut_off.folder, 0, 10)
    copy = Copy(
        slot=0, rank=0, ranks=1, step=10, size_bytes=index.size_bytes, hash=index.hash,
        index=encode(index),
    )  # fmt: skip
    cut_off.standing.order = order(0)
    has_begun = threading.Event()

    def hang() -> None:
        with Call(other.peer(1), cut_off.standing) as call:
            link = call._ready()
            link.say(PutCopy(copy=copy))
            link.hear_answer(SendFrom)
            has_begun.set()
            link._read(1)

    async with running([one, other]):
        other.keep.begins(order(1))
        hanging = asyncio.create_task(asyncio.to_thread(hang))
        await asyncio.to_thread(has_begun.wait, 30)
        one.save(0, 10, round=2)
        one.keep.begins(order(0, round=2, peers=[other.peer(1)]))
        assert await other.has_held(0, 0, 10) == state_of(0, 10)
        (ended,) = await asyncio.gather(hanging, return_exceptions=True)
    assert "it has closed the connection" in str(ended)
