"""A rank that exits while threads of torch are at work: they must not abort it."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everstep_services.agent.stalls.torch_server import ask
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.bootstrap import torch_exit

pytest.importorskip("torch")

EXITING = """
import sys

from trainer_sdk.bootstrap.torch_hooks import serve_torch

serve_torch(sys.argv[1])
import torch

print("up", flush=True)
sys.stdin.readline()
"""
_SET_NAME = 15


async def test_a_rank_that_is_asked_for_tracebacks_until_it_has_exited_exits_well(
    tmp_path: Path,
) -> None:
    """Evidence and looks at stalls never end a training that is just ending (A3.2)."""
    rank = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", EXITING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answers = 0

    async def ask_on() -> None:
        nonlocal answers
        while rank.poll() is None:
            answers += await ask(tmp_path, "dump_traceback", 60.0) is not None
            if answers == 20:
                await asyncio.to_thread(rank.stdin.close)  # type: ignore[union-attr]
            await asyncio.sleep(0)

    with rank:
        assert rank.stdout is not None
        assert await asyncio.to_thread(rank.stdout.readline) == "up\n"
        async with asyncio.timeout(120.0), asyncio.TaskGroup() as asking:
            for _ in range(4):
                asking.create_task(ask_on())
        assert rank.stderr is not None
        assert (rank.returncode, rank.stderr.read()) == (0, "")
    assert answers >= 20
    assert not (tmp_path / layout.WORKER_SOCKET).exists()


class NamedThread:
    """A thread with the name of one of gloo's, which computes until it is let off."""

    def __init__(self) -> None:
        self.may_sleep = threading.Event()
        self._over = threading.Event()
        self._computes = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "NamedThread":
        self._thread.start()
        assert self._computes.wait(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.may_sleep.set()
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop")
        self._computes.set()
        while not self.may_sleep.is_set():
            pass
        self._over.wait()


def test_the_exit_waits_for_a_thread_of_gloo_that_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be about to free the tensors of the last collective."""
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            gloo.may_sleep.set()
        threading.Event().wait(0.001)

    monkeypatch.setattr(torch_exit, "sleep", sleep)
    monkeypatch.setattr(torch_exit, "_MOST_S", 60.0)
    with NamedThread() as gloo:
        torch_exit._wait("", os.getpid())
    assert looks >= 5


def test_a_thread_that_never_sleeps_delays_the_exit_by_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(torch_exit, "sleep", sleep)
    monkeypatch.setattr(torch_exit, "monotonic", lambda: now)
    monkeypatch.setattr(torch_exit, "_EVERY_S", 0.5)
    with NamedThread():
        until(lambda: torch_exit._some_thread_runs() or None, "it computes")
        torch_exit._wait("", os.getpid())
    assert now == pytest.approx(torch_exit._MOST_S, abs=0.5)
