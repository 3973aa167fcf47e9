"""The report on the process of a stalled rank, and when it is asked for."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep_services.agent.stalls.interpreter import (
    Interpreter,
    Interpreters,
    in_words,
    look_into,
)
from everstep_services.agent.stalls.process_state import ProcessState, state_of
from everstep_services.agent.stalls.torch_server import TorchServerError, answer
from tests.fakes.clock import FakeClock
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, clock_of_pages, limits_of
from tests.unit.worker_server import Answers, worker_server
from tests.waiting import until_async
from trainer_sdk import layout

WAITS = "it waits for other ranks, so the cause may be another one"
MAY_WAIT = "it may wait for other ranks, so the cause may be another one"
HELD = "it holds the interpreter's lock: no Python thread of it runs"
TRACEBACK = b"""Current thread 0x00007fd4c37fe6c0 (most recent call first):
  <no Python frame>

Thread 0x00007fd4c37fe6c1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Thread 0x00007fd4eae5bb80 (most recent call first):
  File "/home/u/train.py", line 11 in load
  File "/home/u/train.py", line 93 in <module>
"""


def kernel(root: Path, pid: int, letter: str, channel: str = "0") -> Path:
    """A /proc with one process."""
    folder = root / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a ) b) {letter} 1 2 3")
    (folder / "wchan").write_text(channel)
    return root


@pytest.mark.parametrize(
    ("letter", "channel", "text"),
    [
        ("D", "0", "it waits for a disk or a driver (D)"),
        ("D", "blk_mq_get_tag", "it waits for a disk or a driver (D, blk_mq_get_tag)"),
        ("D", "nvidia_ioctl", "it waits for a disk or a driver (D, nvidia_ioctl)"),
        ("D", "nfs_wait_bit", "it waits for a network file system (D, nfs_wait_bit)"),
        ("D", "kernel_clone", "it waits for a child that starts a program (D, kernel_clone)"),
        ("S", "futex_wait_queue", "it waits for a lock (futex_wait_queue)"),
        ("S", "hrtimer_nanosleep", "it sleeps (hrtimer_nanosleep)"),
        ("S", "something_new", "something_new"),
        ("S", "0", ""),
        ("T", "do_signal_stop", "it is stopped, as by SIGSTOP"),
        ("R", "0", "it computes, or holds the interpreter's lock"),
        ("Z", "0", "zombie: exited, not yet reaped"),
    ],
)
def test_what_the_kernel_says(tmp_path: Path, letter: str, channel: str, text: str) -> None:
    assert state_of(7, kernel(tmp_path, 7, letter, channel)) == ProcessState(letter, text)


def test_of_a_process_that_is_gone_nothing_is_said(tmp_path: Path) -> None:
    assert state_of(7, tmp_path) == ProcessState("", "")


@pytest.mark.parametrize(
    ("process", "python", "waits_in", "text"),
    [
        (("S", "it sleeps"), None, None, f"it sleeps; {MAY_WAIT}"),
        (("S", "it sleeps"), None, "", "it sleeps"),
        (
            ("S", "it waits for a lock (futex)"),
            None,
            "",
            f"it waits for a lock (futex); {MAY_WAIT}",
        ),
        (
            ("S", "it waits for a lock"),
            Interpreter(runs=True, at="train.py:11 in load"),
            "",
            "it waits for a lock; its main thread is at train.py:11 in load",
        ),
        (("S", "it sleeps"), Interpreter(runs=False), None, f"{HELD}; it sleeps"),
        (
            ("S", "it sleeps"),
            Interpreter(runs=True, at="train.py:11 in load"),
            "",
            "it sleeps; its main thread is at train.py:11 in load",
        ),
        (
            ("R", "it computes, or holds …"),
            Interpreter(runs=True),
            None,
            f"it computes; {MAY_WAIT}",
        ),
        (("R", "it computes, or holds …"), Interpreter(runs=False), None, f"{HELD}; it computes"),
        (
            ("S", "it waits for a lock"),
            Interpreter(runs=True),
            "gloo:all_reduce",
            f"it waits for a lock; it is in the collective gloo:all_reduce; {WAITS}",
        ),
        (
            ("S", "it waits for a lock"),
            Interpreter(runs=True, at="distributed_c10d.py:2799 in recv"),
            "",
            f"it waits for a lock; its main thread is at distributed_c10d.py:2799 in recv; {WAITS}",
        ),
        (("T", "it is stopped"), Interpreter(runs=False), None, "it is stopped"),
        (("D", "it waits for a disk"), Interpreter(runs=False), None, "it waits for a disk"),
        (("", ""), None, None, MAY_WAIT),
    ],
)
def test_what_is_said_of_it(
    process: tuple[str, str], python: Interpreter | None, waits_in: str | None, text: str
) -> None:
    found = in_words(ProcessState(*process), python, waits_in)
    assert found.text == text
    waits = True if text.endswith(WAITS) else None if text.endswith(MAY_WAIT) else False
    assert found.is_waiting_for_ranks is waits


def silent() -> bytes | None:
    return None


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (
            {"ping": lambda: b"pong", "dump_traceback": lambda: TRACEBACK},
            Interpreter(runs=True, at="train.py:11 in load"),
        ),
        (
            {"ping": lambda: b"pong", "dump_traceback": lambda: b"Thread 0x1 (most recent"},
            Interpreter(runs=True),
        ),
        ({"ping": lambda: b"pong", "dump_traceback": silent}, Interpreter(runs=False)),
        ({"ping": silent, "dump_traceback": silent}, None),  # it is stopped, or has no turn
        ({"ping": lambda: b"pong"}, None),  # a torch that has no such handler
    ],
    ids=["runs", "runs-without-a-frame", "held", "silent", "unknown"],
)
async def test_what_a_rank_shows(
    tmp_path: Path, answers: Answers, found: Interpreter | None
) -> None:
    async with worker_server(tmp_path, answers):
        # A machine that stalls may keep an answer from coming in time, and never makes one up.
        await until_async(
            lambda: _looked(tmp_path, found), f"it is found that {found}", holds=lambda one: one[0]
        )


async def _looked(folder: Path, wanted: Interpreter | None) -> tuple[bool, Interpreter | None]:
    found = await look_into(folder)
    assert found in {wanted, None}
    return found == wanted, found


async def test_a_rank_without_a_server_is_not_asked(tmp_path: Path, clock: FakeClock) -> None:
    interpreters = Interpreters(clock)
    assert not interpreters.is_open(tmp_path, clock.now())
    assert await look_into(tmp_path) is None


async def test_a_rank_is_asked_once_for_each_stall_and_old_answers_do_not_count(
    tmp_path: Path, clock: FakeClock
) -> None:
    interpreters, asked_s = Interpreters(clock), clock.now()
    async with worker_server(tmp_path, {"dump_traceback": lambda: TRACEBACK, "ping": lambda: b""}):
        assert interpreters.is_open(tmp_path, asked_s - 1)
        await until_async(lambda: _known(interpreters, tmp_path), "it has answered")
        assert not interpreters.is_open(tmp_path, asked_s - 1)
        await clock.advance(6)
        assert interpreters.of(tmp_path) is None
        assert not interpreters.is_open(tmp_path, asked_s - 1)
        assert interpreters.is_open(tmp_path, clock.now())  # it has stalled only now


async def _known(interpreters: Interpreters, folder: Path) -> Interpreter | None:
    await interpreters.ask(folder)
    return interpreters.of(folder)


@pytest.fixture
def pages() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class TestAStalledRank:
    """One rank in a section, past its limit, as its agent's watch sees it."""

    @pytest.fixture
    def node(self, tmp_path: Path, pages: Clock) -> WatchedNode:
        node = WatchedNode(tmp_path, pages, limits_of(data=30).rules, 1)
        node.ranks[0].run.step()
        node.ranks[0].run.begin("data")
        return node

    def test_that_waits_for_a_disk_is_said_so_at_once(
        self, node: WatchedNode, tmp_path: Path
    ) -> None:
        kernel(node.proc, 100, "D", "blk_mq_get_tag")
        (tmp_path / "worker.sock").touch()  # it has a server, which need not be asked
        node.wait(30)
        assert node.words == ["it waits for a disk or a driver (D, blk_mq_get_tag)"]

    def test_of_a_script_without_torch_is_said_at_once(self, node: WatchedNode) -> None:
        kernel(node.proc, 100, "R")
        node.wait(30)
        assert node.words == [f"it computes, or holds the interpreter's lock; {MAY_WAIT}"]

    def test_is_said_without_an_answer_that_does_not_come(
        self, node: WatchedNode, tmp_path: Path
    ) -> None:
        kernel(node.proc, 100, "S", "hrtimer_nanosleep")
        (tmp_path / "worker.sock").touch()
        node.wait(30.4)
        assert node.words == []
        node.wait(0.2)
        assert node.words == [f"it sleeps (hrtimer_nanosleep); {MAY_WAIT}"]

    def test_that_moves_again_at_once_was_found_before(
        self, node: WatchedNode, tmp_path: Path
    ) -> None:
        (tmp_path / "worker.sock").touch()
        node.wait(30.2)
        node.ranks[0].run.end("data")
        node.watch.look()
        assert (len(node.stalled), len(node.moving)) == (1, 1)

    def test_of_a_round_that_is_over_is_not_said(self, node: WatchedNode, tmp_path: Path) -> None:
        (tmp_path / "worker.sock").touch()
        node.wait(30.2)
        node.watch.ends()
        node.begin(2)
        node.wait(1)
        assert node.stalled == []

    async def test_is_asked_before_it_is_late_so_that_its_finding_waits_for_nothing(
        self, node: WatchedNode, pages: Clock, tmp_path: Path
    ) -> None:
        node.wait(29.5)
        async with (
            worker_server(
                tmp_path, {"ping": lambda: b"pong", "dump_traceback": lambda: TRACEBACK}
            ) as asked,
            asyncio.TaskGroup() as tasks,
        ):
            watching = tasks.create_task(node.watch.judge_for_ever())
            await until_async(lambda: asked, "it is asked")
            await until_async(lambda: node.watch._interpreters.of(tmp_path), "it has answered")
            assert node.stalled == []
            pages.now += 0.6
            node.watch.look()
            assert node.words == ["its main thread is at train.py:11 in load"]
            assert asked.count("dump_traceback") == 1
            watching.cancel()


def test_a_finding_is_not_overtaken_while_it_waits_for_an_answer(
    tmp_path: Path, pages: Clock
) -> None:
    """The incident has the name of the rank that is reported first (A3.2)."""
    node = WatchedNode(tmp_path, pages, limits_of(data=30).rules, 2)
    for rank in node.ranks:
        rank.run.step()
    for rank in node.ranks:
        rank.run.begin("data")
        pages.now += 0.01
    asked = tmp_path / "asked"
    asked.mkdir()
    (asked / "worker.sock").touch()
    node.watched(0).folder = asked
    node.wait(30.3)
    assert node.stalled == []
    node.wait(0.5)
    assert [stalled.place.rank for stalled in node.stalled] == [0, 1]


async def test_the_server_of_a_process_that_stands_still_is_not_said_to_be_gone(
    tmp_path: Path,
) -> None:
    """Nobody takes its connections: the kernel keeps a few, and refuses more."""
    path = tmp_path / layout.WORKER_SOCKET
    with ExitStack() as open_, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                client = open_.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        with pytest.raises(TorchServerError, match="accepts no connection"):
            await answer(tmp_path, "ping", 5.0)
