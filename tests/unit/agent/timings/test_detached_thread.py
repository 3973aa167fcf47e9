"""A call that hangs, as a driver's may, keeps neither the agent waiting nor its process alive."""

import subprocess
import sys
from threading import Event

import pytest

from everstep_services.agent.timings.node_readings import DetachedThread
from tests.waiting import until_async


async def test_it_returns_what_the_call_returns_or_raises() -> None:
    thread = DetachedThread[int]("test")
    assert await thread.run(lambda: 7, 60.0) == 7

    def fail() -> int:
        raise OSError("no such process")

    for _ in range(2):
        with pytest.raises(OSError, match="no such process"):
            await until_async(lambda: thread.run(fail, 60.0), "the thread before has ended")


async def test_while_a_call_hangs_no_other_is_begun() -> None:
    thread, goes_on = DetachedThread[bool]("test"), Event()
    assert await thread.run(lambda: goes_on.wait(60), 0.01) is None
    assert await thread.run(lambda: True, 60.0) is None, "at once"
    goes_on.set()
    assert await until_async(lambda: thread.run(lambda: True, 60.0), "it works again")


def test_a_process_ends_although_a_call_hangs() -> None:
    script = (
        "import asyncio, threading\n"
        "from everstep_services.agent.timings.node_readings import DetachedThread\n"
        "hang = threading.Event().wait\n"
        "print(asyncio.run(DetachedThread('test').run(hang, 0.01)))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"None\n", b"")
