"""A rank that exits while threads of torch are at work: they must not abort it."""

import asyncio
import atexit
import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_services.agent.stalls.torch_server import ask
from tests.waiting import turns
from trainer_sdk import layout
from trainer_sdk.bootstrap import torch_exit

pytest.importorskip("torch")

import torch.distributed as dist

from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.nvrx.rank_groups import GroupWrapper

EXITING = """
import sys

from trainer_sdk.bootstrap.torch_hooks import serve_torch

serve_torch(sys.argv[1])
import torch

print("up", flush=True)
sys.stdin.readline()
"""
SERVER = """
import socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    print("listens", flush=True)
    with server.accept()[0]:
        print("accepted", flush=True)
        sys.stdin.read()
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
            answer = await ask(tmp_path, "dump_traceback", 60.0)
            answers += answer is not None  # not with the `await`: another task counts meanwhile
            if answer is not None and answers == 20:
                await asyncio.to_thread(rank.stdin.close)  # type: ignore[union-attr]
            await turns()

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
    """A thread with the name of one of gloo's, which works until it is let off."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.may_sleep = threading.Event()
        self._work = work
        self._over = threading.Event()
        self._works = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "NamedThread":
        self._thread.start()
        assert self._works.wait(60.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.may_sleep.set()
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop")
        self._works.set()
        while not self.may_sleep.is_set():
            self._work()
        self._over.wait()


def wait_short() -> None:
    """As a thread that wants the interpreter's lock: it sleeps, and looks again and again."""
    threading.Event().wait(0.001)


class Looks:
    """Counts the looks of an exit at its threads; at the fifth, a thread is let off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thread: NamedThread) -> None:
        self.count = 0
        self._thread = thread
        monkeypatch.setattr(torch_exit, "sleep", self._sleep)
        monkeypatch.setattr(torch_exit, "_MOST_S", 60.0)

    def _sleep(self, seconds: float) -> None:
        self.count += 1
        if self.count == 5:
            self._thread.may_sleep.set()
        threading.Event().wait(seconds)


@pytest.mark.parametrize("work", [lambda: None, wait_short], ids=["computes", "wants the lock"])
def test_the_exit_waits_for_a_thread_of_gloo_that_still_works(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]
) -> None:
    """It may be about to free the tensors of the last collective."""
    with NamedThread(work) as gloo:
        looks = Looks(monkeypatch, gloo)
        torch_exit._wait()
    assert looks.count >= 5


def test_a_fork_waits_for_its_own_threads_and_leaves_its_parents_server_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (path := tmp_path / "socket").touch()
    monkeypatch.setattr(torch_exit, "_served", (os.getppid(), str(path), str(path)))
    with NamedThread() as gloo:
        looks = Looks(monkeypatch, gloo)
        torch_exit._wait()
    assert looks.count >= 5
    assert path.exists()


@pytest.mark.parametrize("longest_pause_s", [0.005, 30.0])
def test_a_thread_that_never_sleeps_delays_the_exit_by_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, longest_pause_s: float
) -> None:
    """However long the interpreter lets a thread of Python run."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        threading.Event().wait(0.01)

    monkeypatch.setattr(torch_exit, "sleep", sleep)
    monkeypatch.setattr(torch_exit, "monotonic", lambda: now)
    monkeypatch.setattr(torch_exit, "_EVERY_S", 0.5)
    monkeypatch.setattr(sys, "getswitchinterval", lambda: longest_pause_s)
    with NamedThread():
        torch_exit._wait()
    assert now == pytest.approx(torch_exit._MOST_S)


def test_an_exit_without_proc_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sandbox, or in a process that has no free descriptor."""

    def refused(*_: object) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "listdir", refused)
    torch_exit._wait()


@pytest.mark.parametrize("is_own", [True, False])
def test_only_requests_to_the_process_itself_delay_its_exit(tmp_path: Path, is_own: bool) -> None:
    """With long paths, the servers of all ranks of a node have the same name."""
    path = tmp_path / "s"
    server = [sys.executable, "-c", SERVER, str(path)]
    with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as client:
        if is_own:
            own.bind(str(path))
            own.listen()
            client.connect(str(path))
            with own.accept()[0]:
                assert torch_exit._is_asked(os.fsencode(path))
            return
        with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            client.connect(str(path))
            assert other.stdout.readline() == b"accepted\n"
            assert not torch_exit._is_asked(os.fsencode(path))


@pytest.mark.parametrize("make", [group_of_all, GroupWrapper])
def test_whoever_lets_us_make_collectives_is_waited_for_without_an_agent(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    """Ours may be the last collective before the exit."""
    handlers: list[object] = []
    monkeypatch.setattr(torch_exit, "_waits", False)
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for _ in range(2):
        make()
    assert handlers == [torch_exit._wait]
