"""Whichever process of a node dies, nothing is left behind, and nothing foreign is touched."""

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from operator import not_
from pathlib import Path

import psutil
import pytest

from everstep_services.agent.ranks.protocol import (
    RankRuns,
    StartRefusedError,
    WardenLost,
    WardenLostError,
)
from everstep_services.agent.ranks.setup import sweep
from everstep_services.agent.ranks.warden_client import WardenClient, held_folder, opened_warden
from tests.integration.scripts.rig import SCRIPTS, Node, alive, below, make_plan, opened, tagged
from tests.stopping import stop
from tests.waiting import until_async
from trainer_sdk.wire import ForgeDown, ForgeUp

Process = asyncio.subprocess.Process


@pytest.fixture
def foreign() -> Iterator[int]:
    """Somebody else's process: same program, same folder, same session as the tests."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "stay.py"), "still"],
        cwd=SCRIPTS,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "RANK": "0", "EVERSTEP_SOMETHING": "else"},
    )
    yield process.pid
    assert process.poll() is None, "it was touched"
    process.kill()
    process.wait()


def are(count: int) -> Callable[[list[int]], bool]:
    return lambda pids: len(pids) == count


async def settled(node: Node, ranks: int) -> dict[int, int]:
    """Wait until their scripts have done what they should; their process ids."""
    events = await node.next(RankRuns, ranks)
    for event in events:
        await until_async(partial(node.out, event.rank), "here", holds=lambda out: "here" in out)
    return {event.rank: event.pid for event in events}


async def test_stop_asks_then_kills(tmp_path: Path, foreign: int) -> None:
    """Ranks that ignore SIGTERM are killed after the grace (A4.7)."""
    async with opened(tmp_path, "stay.py", "deaf") as node:
        await node.start(2)
        await settled(node, 2)
        done = await node.keeper.stop(grace_s=0.3)
        assert (done.ranks, done.killed, done.left) == ((0, 1), (0, 1), ())
        assert done.stop_s >= 0.3
        assert {event.signal for event in (await node.gone(2)).values()} == {"SIGKILL"}


def unread(keeper: WardenClient) -> int:
    """How many bytes of its orders the warden has not read yet."""
    link = keeper._writer.get_extra_info("socket")
    (count,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
    return int(count)


async def test_who_had_ended_before_the_order_to_stop_was_not_told_to(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still") as node:
        await node.start(3)
        pids = await settled(node, 3)
        warden = psutil.Process(node.warden())
        warden.suspend()  # it has no turn: the death and the order wait for it together
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGABRT)
        for rank in (0, 1):
            process = psutil.Process(pids[rank])
            await until_async(process.status, "it is dead", holds=psutil.STATUS_ZOMBIE.__eq__)
        stopping = asyncio.create_task(node.keeper.stop(grace_s=60))
        await until_async(lambda: unread(node.keeper), "the order waits for it")
        warden.resume()
        assert (await stopping).ranks == (2,)
        gone = await node.gone(3)
        assert {rank: one.was_told for rank, one in gone.items()} == {0: False, 1: False, 2: True}


async def test_stop_does_not_wait_for_a_grace_that_nobody_needs(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still") as node:
        await node.start(2)
        await settled(node, 2)
        done = await node.keeper.stop(grace_s=60)
        assert (done.ranks, done.killed) == ((0, 1), ())
        assert done.stop_s < 60
        assert (await node.keeper.stop(grace_s=60)).ranks == ()


async def test_stop_leaves_nothing_of_a_large_family(tmp_path: Path, foreign: int) -> None:
    """200 children of a rank end with it, and a foreign process lives on (A4.7)."""
    async with opened(tmp_path, "stay.py", "family", "200", "bare") as node:
        await node.start(1)
        await settled(node, 1)
        family = await until_async(
            lambda: below(node.warden()), "all are there", holds=lambda found: len(found) > 190
        )
        done = await node.keeper.stop(grace_s=0.1)
        assert done.left == ()
        assert done.swept > 190
        assert not [pid for pid in family if alive(pid)]


async def test_a_killed_rank_is_told_at_once_and_its_children_go_with_the_round(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, "stay.py", "family", "8") as node:
        began = await node.start(2)
        victim = (await settled(node, 2))[1]
        os.kill(victim, signal.SIGKILL)
        gone = (await node.gone())[1]
        assert (gone.pid, gone.signal, gone.code) == (victim, "SIGKILL", None)
        assert gone.lasted_s < asyncio.get_running_loop().time() - began
        done = await node.keeper.stop(grace_s=0.1)
        assert done.ranks == (0,)
        assert below(node.warden(), deep=False) == []


async def test_a_killed_warden_takes_the_ranks_with_it(tmp_path: Path, foreign: int) -> None:
    """Ranks and their children end, and a foreign process lives on (A12.2)."""
    async with opened(tmp_path, "stay.py", "family", "20") as node:
        await node.start(2)
        await settled(node, 2)
        family = below(node.warden())
        os.kill(node.warden(), signal.SIGKILL)
        (lost,) = await node.next(WardenLost)
        assert "killed by SIGKILL" in lost.reason
        await until_async(lambda: [pid for pid in family if alive(pid)], "all are gone", holds=not_)
        with pytest.raises(WardenLostError, match="warden of this node has ended"):
            await node.keeper.stop(grace_s=1)
        assert node.left() == []


AGENT = """
import asyncio, sys
from pathlib import Path
from tests.integration.scripts.rig import opened
from everstep_services.agent.ranks.protocol import RankRuns

async def main(folder, warm):
    arguments = ("stay.py", "family", "20", sys.argv[3])
    async with opened(Path(folder), *arguments, warm=warm, preload=(), bare=True) as node:
        await node.start(2, warm=warm)
        await node.next(RankRuns, 2)
        print(node.warden(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], sys.argv[2] == "warm"))
"""


@asynccontextmanager
async def agent(folder: Path, kind: str, children: str) -> AsyncIterator[tuple[Process, int]]:
    """An agent in a process of its own, to be killed, and its warden."""
    root = SCRIPTS.parents[2]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", AGENT, str(folder), kind, children],
        stdout=asyncio.subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    try:
        warden = int(await process.stdout.readline())
        await until_async(
            lambda: below(warden), "more than 30 processes", holds=lambda found: len(found) > 30
        )
        yield process, warden
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", ["cold", "warm"])
async def test_a_killed_agent_leaves_nothing(tmp_path: Path, foreign: int, kind: str) -> None:
    """Warden, ranks and children end, and a foreign process lives on (A12.2)."""
    async with agent(tmp_path, kind, "bare") as (process, warden):
        family = [warden, *below(warden)]
        process.kill()
        await until_async(lambda: [pid for pid in family if alive(pid)], "all are gone", holds=not_)
        assert tagged(tmp_path.name + str(process.pid)) == []


async def test_the_next_agent_kills_what_two_dead_ones_left(tmp_path: Path, foreign: int) -> None:
    """Leftovers are found by their tag; a foreign process lives on (A12.2)."""
    async with agent(tmp_path / "first", "cold", "tagged") as (process, warden):
        instance = "first" + str(process.pid)
        stop(process.pid)  # so that it cannot clean up after its warden
        os.kill(warden, signal.SIGKILL)
        process.kill()
        await process.wait()
        assert tagged(instance)
        async with opened(tmp_path / "second", "stay.py", "still"):
            await until_async(lambda: tagged(instance), "all are gone", holds=not_)


async def test_two_agents_of_one_node_do_not_touch_each_other(tmp_path: Path) -> None:
    """One agent ends its ranks, and the other agent's ranks live on (A2.8)."""
    async with opened(tmp_path / "one", "stay.py", "still") as one:
        await one.start()
        await settled(one, 1)
        async with opened(tmp_path / "two", "stay.py", "still") as two:
            await two.start()
            await settled(two, 1)
            assert one.left()
        assert two.left() == []
        assert [pid for pid in one.left() if alive(pid)]
    assert one.left() == []


async def test_a_runtime_directory_has_one_agent(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still"):
        with pytest.raises(StartRefusedError, match="another agent uses"):
            async with held_folder(make_plan(tmp_path, "stay.py", "still")):
                pass


async def test_between_two_wardens_nobody_takes_the_folder_for_left_behind(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "stay.py", "still")
    async with held_folder(plan) as lock:
        for _ in range(2):
            async with opened_warden(plan, lock):
                pass
            await asyncio.to_thread(sweep, tmp_path)
            assert plan.runtime_dir.exists()
    await asyncio.to_thread(sweep, tmp_path)
    assert not plan.runtime_dir.exists()


async def test_a_killed_forge_harms_no_rank_and_comes_back(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still", warm=True, preload=(), bare=True) as node:
        await node.next(ForgeUp)
        await node.start(2, warm=True)
        pids = await settled(node, 2)
        command = psutil.Process(pids[0]).cmdline()
        assert command[1:3] == [str(SCRIPTS / "stay.py"), "still"]
        os.kill(node.forge(), signal.SIGKILL)
        (unfit,) = await node.next(ForgeDown)
        assert not unfit.final
        await node.next(ForgeUp)
        assert len((await node.keeper.stop(grace_s=5)).ranks) == 2


async def test_ranks_forked_ahead_outlive_a_stop_and_take_part_in_the_next_round(
    tmp_path: Path,
) -> None:
    """What was sent to one before is not meant for it; one that was killed is forked again."""
    async with opened(tmp_path, "stay.py", "still", warm=True, preload=()) as node:
        await node.next(ForgeUp)
        await node.start(2, warm=True)
        await settled(node, 2)
        forge = node.forge()
        ahead = await until_async(lambda: below(forge), "2 below a holder", holds=are(3))
        (holder,) = below(forge, deep=False)
        well, killed = sorted(set(ahead) - {holder})
        os.kill(well, signal.SIGTERM)
        os.kill(killed, signal.SIGKILL)
        await until_async(lambda: alive(killed), "it is dead", holds=not_)
        done = await node.keeper.stop(grace_s=5)
        assert (done.swept, done.left, alive(well)) == (0, (), True)
        await node.gone(2)
        await node.start(2, warm=True)
        pids = await settled(node, 2)
        assert well in pids.values()
        assert killed not in pids.values()
        assert {psutil.Process(pid).ppid() for pid in pids.values()} == {node.warden()}
        await until_async(lambda: below(forge), "the next 2", holds=are(3))
        ahead = below(forge)
        os.kill(forge, signal.SIGKILL)
        await until_async(lambda: [pid for pid in ahead if alive(pid)], "they end", holds=not_)
        assert alive(well)


async def test_a_stopped_forge_is_replaced_by_a_cold_start(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still", warm=True, preload=(), bare=True) as node:
        await node.next(ForgeUp)
        stop(node.forge())
        node.forge_within_s = 1.0
        await node.start(1, warm=True)
        (runs,) = await node.next(RankRuns)
        assert runs.start == "cold"


async def test_signals_go_to_ranks_that_can_take_them(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "ears") as node:
        await node.start(2)
        await settled(node, 2)
        assert await node.keeper.signal(signal.SIGUSR2) == (0, 1)
        assert await node.keeper.signal(signal.SIGUSR1, (1,)) == ()
        got = f"got {int(signal.SIGUSR1)}"
        await until_async(lambda: node.out(1), got, holds=lambda out: got in out)
        assert "got" not in node.out(0)
        assert await node.keeper.signal(signal.SIGTERM) == ()
        assert {event.signal for event in (await node.gone(2)).values()} == {"SIGTERM"}


async def test_a_long_runtime_directory_works(tmp_path: Path) -> None:
    """Sockets work although the folder's path is longer than a socket's may be (A13.4)."""
    folder = tmp_path / ("long" * 40)
    async with opened(folder, "stay.py", "still") as node:
        await node.start()
        (runs,) = await node.next(RankRuns)
        assert runs.start_s < 30
        page = node.keeper.page(0)
        assert page is not None
        assert page.pid == runs.pid
        assert page.dropped == 0
