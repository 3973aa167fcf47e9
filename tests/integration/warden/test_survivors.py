"""Ranks that survive a round wait for the next one; all that does not fit ends as ever."""

import os
import signal
from contextlib import AbstractAsyncContextManager
from functools import partial
from operator import not_
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.ranks.protocol import RankRuns
from tests.integration.scripts.rig import Node, alive, below, opened, tagged
from tests.waiting import until_async
from trainer_sdk.wire import ForgeUp, SaveTogether

ALL = (0, 1, 2)
SURVIVOR = str(Path(__file__).with_name("survivor.py"))


def ranks(folder: Path, *how: str, **changes: Any) -> AbstractAsyncContextManager[Node]:
    return opened(folder, "", *how, target=SURVIVOR, **changes)


async def begun(node: Node, count: int) -> dict[int, RankRuns]:
    """Wait until their scripts run, and listen to the warden."""
    events: dict[int, RankRuns] = {}
    while len(events) < count:
        (event,) = await node.next(RankRuns)
        if event.round == node.round:
            events[event.rank] = event
    for rank in events:
        await until_async(partial(node.out, rank), "here", holds=lambda out: "here" in out)
    return events


def pids(runs: dict[int, RankRuns]) -> dict[int, int]:
    return {rank: event.pid for rank, event in runs.items()}


def starts(runs: dict[int, RankRuns]) -> dict[int, str]:
    return {rank: event.start for rank, event in runs.items()}


async def ended(*gone: int) -> None:
    for pid in gone:
        await until_async(partial(alive, pid), "it ends", holds=not_)


async def family(node: Node, rank: int) -> list[int]:
    place = node.rank_folder(rank) / "family"
    lines = await until_async(
        lambda: place.read_text().split() if place.exists() else [],
        "all are there",
        holds=lambda lines: len(lines) == 3,
    )
    return [int(line) for line in lines]


@pytest.mark.parametrize("warm", [False, True])
async def test_only_the_killed_rank_is_started_anew(tmp_path: Path, *, warm: bool) -> None:
    async with ranks(tmp_path, warm=warm, preload=(), bare=warm) as node:
        if warm:
            await node.next(ForgeUp)
        await node.start(3, warm=warm)
        before = await begun(node, 3)
        for lost in (1, 2):
            os.kill(before[lost].pid, signal.SIGKILL)
            assert (await node.gone())[lost].was_told is False
            rest = tuple(rank for rank in ALL if rank != lost)
            done = await node.keeper.stop(grace_s=60, keeps=rest)
            assert (done.ranks, done.killed, done.kept, done.left) == ((), (), rest, ())
            await node.start(3, warm=warm)
            now = await begun(node, 3)
            assert {rank: pids(now)[rank] for rank in rest} == {
                rank: pids(before)[rank] for rank in rest
            }
            new = "warm" if warm else "cold"
            assert starts(now) == {**dict.fromkeys(rest, "kept"), lost: new}
            assert {event.round for event in now.values()} == {node.round}
            before = now
        os.kill(before[0].pid, signal.SIGKILL)
        gone = (await node.gone())[0]
        assert (gone.round, gone.rank, gone.was_told) == (3, 0, False)
        done = await node.keeper.stop(grace_s=60)
        assert (done.ranks, done.killed, done.kept) == ((1, 2), (), ())
        assert not {pid for pid in pids(before).values() if alive(pid)}


async def test_ranks_that_were_forked_ahead_in_vain_end_later(tmp_path: Path) -> None:
    """They stand back meanwhile: all ranks wait for the one that is new."""
    async with ranks(tmp_path, warm=True, preload=(), bare=True) as node:
        await node.next(ForgeUp)
        await node.start(3, warm=True)
        before = await begun(node, 3)
        known = len(ALL) + 2  # and the forge, and the process that has forked ahead
        await until_async(
            lambda: below(node.warden()),
            "the next ranks are forked",
            holds=lambda pids: len(pids) == known + len(ALL),
        )
        os.kill(before[1].pid, signal.SIGKILL)
        await node.gone()
        await node.keeper.stop(grace_s=60, keeps=(0, 2))
        await node.start(3, warm=True)
        await until_async(
            lambda: [niceness(pid) for pid in below(node.warden())],
            "two stand back",
            holds=lambda each: each.count(19) == 2,
        )


def niceness(pid: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return 0


async def test_parked_ranks_save_and_are_parked_again(tmp_path: Path) -> None:
    async with ranks(tmp_path, "late:2") as node:
        await node.start(3)
        before = await begun(node, 3)
        os.kill(before[0].pid, signal.SIGKILL)
        await node.gone()
        assert (await node.keeper.stop(grace_s=60, keeps=(1, 2))).kept == (1, 2)
        line = SaveTogether(rank=4, world_size=6, master_address="n", master_port=1, within_s=0.3)
        done = await node.keeper.stop(grace_s=60, save=line)
        assert (done.ranks, done.killed, done.kept) == ((2,), (), (1,))
        assert "saves as rank 4 of 6" in node.out(1)
        await node.start(3)
        assert starts(await begun(node, 3)) == {0: "cold", 1: "kept", 2: "cold"}


async def test_the_processes_of_a_parked_rank_stay_and_those_of_others_go(tmp_path: Path) -> None:
    async with ranks(tmp_path, "family") as node:
        await node.start(2)
        runs = await begun(node, 2)
        kept, lost = await family(node, 0), await family(node, 1)
        os.kill(runs[1].pid, signal.SIGKILL)
        await node.gone()
        for _ in range(2):  # they name the folder of the first round in the second one, too
            done = await node.keeper.stop(grace_s=60, keeps=(0,))
            assert (done.kept, done.left) == ((0,), ())
            assert [pid for pid in kept if not alive(pid)] == []
            assert [pid for pid in lost if alive(pid)] == []
            await node.start(1)
            assert starts(await begun(node, 1)) == {0: "kept"}
        done = await node.keeper.stop(grace_s=60)
        assert (done.ranks, done.swept) == ((0,), 3)
        assert [pid for pid in kept if alive(pid)] == []


@pytest.mark.parametrize("how", ["deaf:1", "hangs-up:1", "garbage:1", "endless:1", "out-of-turn:1"])
async def test_a_rank_that_does_not_park_ends_as_others_do(tmp_path: Path, how: str) -> None:
    async with ranks(tmp_path, how) as node:
        await node.start(3)
        before = await begun(node, 3)
        done = await node.keeper.stop(grace_s=60, keeps=ALL)
        assert (done.ranks, done.killed, done.kept) == ((1,), (), (0, 2))
        gone = (await node.gone())[1]
        assert (gone.pid, gone.signal, gone.was_told) == (before[1].pid, "SIGTERM", True)
        await node.start(3)
        assert starts(await begun(node, 3)) == {0: "kept", 1: "cold", 2: "kept"}


async def test_ranks_are_kept_when_the_next_round_breaks_at_once(tmp_path: Path) -> None:
    """The second order to park follows the order to go on, and the new rank has no connection."""
    async with ranks(tmp_path) as node:
        await node.start(3)
        before = await begun(node, 3)
        os.kill(before[1].pid, signal.SIGKILL)
        await node.gone()
        assert (await node.keeper.stop(grace_s=60, keeps=(0, 2))).kept == (0, 2)
        await node.start(3)
        done = await node.keeper.stop(grace_s=60, keeps=ALL)
        assert (done.ranks, done.kept) == ((1,), (0, 2))
        await node.start(3)
        now = await begun(node, 3)
        assert starts(now) == {0: "kept", 1: "cold", 2: "kept"}
        assert {now[rank].pid for rank in (0, 2)} == {before[rank].pid for rank in (0, 2)}


async def test_ranks_that_may_not_be_kept_are_stopped(tmp_path: Path) -> None:
    async with ranks(tmp_path) as node:
        await node.start(3)
        before = await begun(node, 3)
        done = await node.keeper.stop(grace_s=60, keeps=(2,))
        assert (done.ranks, done.kept) == ((0, 1), (2,))
        done = await node.keeper.stop(grace_s=60, keeps=(2,))
        assert (done.ranks, done.kept) == ((), (2,)), "its next round could not be started"
        assert alive(before[2].pid)
        assert (await node.keeper.stop(grace_s=60)).ranks == (2,), "this node is a spare now"
        assert not alive(before[2].pid)


async def test_ranks_that_do_not_survive_are_stopped(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "still") as node:
        await node.start(2)
        await begun(node, 2)
        done = await node.keeper.stop(grace_s=60, keeps=(0, 1))
        assert (done.ranks, done.killed, done.kept) == ((0, 1), (), ())


async def test_a_rank_that_dies_while_it_is_parked_is_started_anew(tmp_path: Path) -> None:
    async with ranks(tmp_path, "family:0") as node:
        await node.start(2)
        before = await begun(node, 2)
        children = await family(node, 0)
        assert (await node.keeper.stop(grace_s=60, keeps=(0, 1))).kept == (0, 1)
        os.kill(before[0].pid, signal.SIGKILL)
        await ended(before[0].pid)
        await node.start(2)
        now = await begun(node, 2)
        assert starts(now) == {0: "cold", 1: "kept"}
        assert pids(now)[1] == pids(before)[1]
        await ended(*children)


async def test_a_parked_rank_that_hangs_up_is_ended(tmp_path: Path) -> None:
    async with ranks(tmp_path, "family:0") as node:
        await node.start(2)
        before = await begun(node, 2)
        worker, *_ = await family(node, 0)
        assert (await node.keeper.stop(grace_s=60, keeps=(0, 1))).kept == (0, 1)
        os.kill(before[0].pid, signal.SIGUSR1)
        await ended(before[0].pid, worker)
        await node.start(2)
        assert starts(await begun(node, 2)) == {0: "cold", 1: "kept"}


async def test_a_parked_rank_without_a_place_is_ended(tmp_path: Path) -> None:
    """The world has shrunk."""
    async with ranks(tmp_path, "family:2") as node:
        await node.start(3)
        before = await begun(node, 3)
        children = await family(node, 2)
        assert (await node.keeper.stop(grace_s=60, keeps=ALL)).kept == ALL
        await node.start(2)
        assert starts(await begun(node, 2)) == {0: "kept", 1: "kept"}
        await ended(before[2].pid, *children)


async def test_a_rank_keeps_its_device_when_its_number_changes(tmp_path: Path) -> None:
    async with ranks(tmp_path) as node:
        node.first = 2
        await node.start(2)
        before = await begun(node, 2)
        assert (await node.keeper.stop(grace_s=60, keeps=(2, 3))).kept == (2, 3)
        node.first = 0
        await node.start(2)
        now = await begun(node, 2)
        assert starts(now) == {0: "kept", 1: "kept"}
        assert pids(now) == {rank - 2: pid for rank, pid in pids(before).items()}


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"])
async def test_a_rank_that_cannot_have_its_new_environment_is_started_anew(
    tmp_path: Path, name: str
) -> None:
    async with ranks(tmp_path) as node:
        await node.start(1, warm=False, **{name: "1"})
        before = await begun(node, 1)
        assert (await node.keeper.stop(grace_s=60, keeps=(0,))).kept == (0,)
        await node.start(1, warm=False, **{name: "2"})
        assert starts(await begun(node, 1)) == {0: "cold"}
        await ended(before[0].pid)


async def test_only_ranks_are_heard(tmp_path: Path) -> None:
    async with ranks(tmp_path, "child") as node:
        await node.start(1)
        await begun(node, 1)
        assert "child: b''" in node.out()
        assert os.stat(node.folder / "survive.sock").st_mode & 0o777 == 0o600
        assert (await node.keeper.stop(grace_s=60, keeps=(0,))).kept == (0,)


@pytest.mark.parametrize("who", ["warden", "agent"])
async def test_no_parked_rank_outlives(tmp_path: Path, who: str) -> None:
    async with ranks(tmp_path, "family") as node:
        await node.start(2)
        runs = await begun(node, 2)
        children = await family(node, 0) + await family(node, 1)
        assert (await node.keeper.stop(grace_s=60, keeps=(0, 1))).kept == (0, 1)
        if who == "warden":
            os.kill(node.warden(), signal.SIGKILL)
            await node.keeper.lost.wait()
            assert not [pid for pid in pids(runs).values() if alive(pid)]
    assert not [pid for pid in (*pids(runs).values(), *children) if alive(pid)]
    assert tagged(node.plan.instance) == []
