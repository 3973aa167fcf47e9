"""Faults in real ranks have the effect that their names promise, and are undone."""

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from everstep_services.agent.injection.service import RankChannel
from everstep_services.agent.ranks.protocol import RankGone, RankRuns, RankSaid
from tests.integration.scripts.rig import Node, opened
from tests.waiting import WITHIN_S, until_async
from trainer_sdk.inject.catalog import BadFaultError, fault_request
from trainer_sdk.page import PageView
from trainer_sdk.page_content import PageReading
from trainer_sdk.wire import Injected

pytestmark = pytest.mark.timeout(180)
MB = 1 << 20
LONG_S = 5.0
"""So that every watcher sees it, even if nothing runs for seconds."""
ROOT = Path(__file__).parents[3]


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with opened(tmp_path, "harmed.py") as node:
        yield node


async def steps(node: Node, ranks: int = 1, *, allowed: bool = True) -> None:
    """Start ranks, and wait until each has made some steps."""
    await node.start(ranks, EVERSTEP_INJECTION="1" if allowed else "")
    await node.next(RankRuns, ranks)
    for rank in range(ranks):
        await moves(node, rank)


async def moves(node: Node, rank: int = 0) -> None:
    begun = page(node, rank).step if node.keeper.page(rank) else 0
    await until_async(lambda: page(node, rank).step > begun + 2, f"rank {rank} makes steps")


def page(node: Node, rank: int = 0) -> PageReading:
    found = node.keeper.page(rank)
    assert found is not None
    return found


async def harm(
    node: Node,
    fault: str,
    *,
    rank: int = 0,
    for_s: float | None = None,
    amount: int | None = None,
    target: str = "",
) -> None:
    async with RankChannel.opened(node.rank_folder(rank), rank) as door:
        await door.knock(fault_request(fault, for_s=for_s, amount=amount, target=target))
        await door.go()


def peak(pid: int) -> int:
    """The most memory that it ever had: nobody can look too late."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def view(node: Node) -> PageView:
    found = node.keeper.watch.rank(0)
    assert found is not None
    return found.page


def value(node: Node, name: str) -> float:
    return view(node).values().get(name, 0.0)


async def stands_while_it_beats(node: Node) -> None:
    """No more steps are made, although another thread goes on."""
    step, beats = page(node).step, value(node, "beats")

    def stood() -> bool:
        nonlocal step, beats
        if page(node).step != step:
            step, beats = page(node).step, value(node, "beats")
        return value(node, "beats") > beats + 40

    await until_async(stood, "steps stand while it beats")


def opened_sections(node: Node) -> list[str]:
    names = view(node).sections()
    return [names[frame.section].name for frame in view(node).lanes()[0].frames]


async def test_a_hanging_main_thread_stands_while_others_run_and_goes_on(node: Node) -> None:
    await steps(node)
    await harm(node, "hang", for_s=LONG_S)
    await stands_while_it_beats(node)
    await moves(node)


async def test_a_stalled_section_stays_open(node: Node) -> None:
    await steps(node)
    await harm(node, "stall", target="forward", for_s=LONG_S)
    await stands_while_it_beats(node)
    assert opened_sections(node) == ["forward"]
    await moves(node)


async def test_the_lock_is_kept_from_every_thread(node: Node) -> None:
    await steps(node)
    await harm(node, "lock-gil", for_s=2.5)
    await until_async(lambda: value(node, "gap") >= 2.5, "no thread could run")
    await moves(node)


async def test_a_stuck_process_is_in_state_d_and_comes_back(node: Node) -> None:
    await steps(node)
    process = psutil.Process(page(node).pid)
    await harm(node, "stuck", for_s=LONG_S)
    await until_async(
        lambda: process.status() == psutil.STATUS_DISK_SLEEP, "it waits in the kernel"
    )
    await moves(node)
    assert process.children() == []


async def test_a_leak_grows_and_is_freed(node: Node) -> None:
    await steps(node)
    process = psutil.Process(page(node).pid)
    before, most = process.memory_info().rss, peak(process.pid)
    await harm(node, "memory_leak", amount=100, for_s=2)
    await until_async(lambda: peak(process.pid) > most + 60 * MB, "it grows")
    await until_async(lambda: process.memory_info().rss < before + 30 * MB, "it is freed")


async def test_slow_steps_take_longer(node: Node) -> None:
    await steps(node)
    await harm(node, "slow", amount=700, for_s=3)
    await until_async(lambda: page(node).longest_step_s > 0.7, "a step took longer")
    await moves(node)


ENDS = {
    "exception": (1, None),
    "async_exception": (1, None),
    "signal_exception": (1, None),
    "abort": (None, signal.SIGABRT),
    "segfault": (None, signal.SIGSEGV),
    "exit": (7, None),
}


async def test_ranks_end_as_they_are_told(node: Node) -> None:
    await steps(node, len(ENDS))
    for rank, fault in enumerate(ENDS):
        await harm(node, fault, rank=rank, amount=7 if fault == "exit" else None)
    gone = await node.gone(len(ENDS))
    for rank, (fault, (code, number)) in enumerate(ENDS.items()):
        assert (gone[rank].code, gone[rank].signal) == (code, number and number.name), fault
        error = await node.keeper.error(rank)
        named = None if error is None else error.name.rpartition(".")[2]
        assert named == ("InjectedError" if code == 1 else None), fault


async def test_a_plan_in_the_environment_is_followed_at_its_step_and_told_first(node: Node) -> None:
    planned = "exit@4:amount=9,rank=1; exit@4:amount=8,rank=0,round=2"
    await node.start(2, EVERSTEP_INJECTION="1", EVERSTEP_INJECT=planned, EVERSTEP_ROUND="1")
    (said,) = await node.next(RankSaid)
    assert said.message == Injected(round=1, rank=1, fault="exit")
    (gone,) = await node.next(RankGone)
    assert (gone.rank, gone.code) == (1, 9)
    assert page(node, 1).step == 4
    await moves(node)


async def test_who_is_not_allowed_listens_to_nothing_and_has_imported_nothing(node: Node) -> None:
    await steps(node, allowed=False)
    with pytest.raises(BadFaultError, match="rank 0 does not listen for faults"):
        await harm(node, "hang")
    assert node.out() == "injection: False\n"


async def test_what_a_rank_cannot_have_it_refuses(node: Node) -> None:
    await steps(node)
    with pytest.raises(BadFaultError, match="rank 0: gpu_sleep needs a process that uses CUDA"):
        await harm(node, "gpu_sleep")
    await moves(node)


def test_a_script_may_harm_itself_without_an_agent_where_it_says_so() -> None:
    lines = (
        "import trainer_sdk",
        "from trainer_sdk import inject",
        "run = trainer_sdk.session()",
        "inject.at_step(3, 'exit', amount=5, allow=True)",
        "while True: print(run.step(), flush=True)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (5, "1\n2\n")
    assert "injecting exit: the process exits at once, without an error" in done.stderr
