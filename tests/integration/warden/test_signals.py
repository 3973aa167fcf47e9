"""Signals to ranks: from the agent, from somebody to one rank, and to every process of the node."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.ranks.protocol import RankRuns
from tests.integration.scripts.rig import Node, alive, below, opened
from tests.waiting import until_async
from trainer_sdk.wire import ForgeUp

DEFERRED = [signal.SIGTERM, signal.SIGHUP]
ANNOUNCE = [signal.SIGUSR1, signal.SIGUSR2]


async def here(node: Node, ranks: int = 2, *, warm: bool = False) -> list[int]:
    """The processes of ranks that wait for signals."""
    if warm:
        await node.next(ForgeUp)
    await node.start(ranks, warm=warm)
    events = await node.next(RankRuns, ranks)
    for rank in range(ranks):
        await until_async(partial(node.out, rank), "it waits", holds=lambda out: "here" in out)
    return [event.pid for event in sorted(events, key=lambda event: event.rank)]


def said(node: Node, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.out(rank).splitlines()]


def heard(node: Node, rank: int = 0) -> list[int]:
    return [line["heard"] for line in said(node, rank) if "heard" in line]


def tell_all(node: Node, number: int) -> None:
    """Signal every process that the keeper has started: warden, forge, ranks."""
    for pid in [node.warden(), *below(node.warden())]:
        os.kill(pid, number)


@pytest.mark.parametrize("warm", [False, True])
async def test_a_script_sees_the_signals_of_a_plain_python(tmp_path: Path, warm: bool) -> None:
    async with opened(tmp_path, "hearing.py", "look", warm=warm, preload=()) as node:
        if warm:
            await node.next(ForgeUp)
        await node.start(1, warm=warm)
        assert (await node.gone())[0].code == 0
        default = str(signal.Handlers.SIG_DFL)
        (saw,) = said(node)
        assert saw == {
            "at_first": [default] * 4 + ["<built-in function default_int_handler>"],
            "before": default,
            "own": True,
            "back": True,
            "again": default,
            "blocked": [],
            "child": -signal.SIGTERM,
            "forked": signal.SIGTERM,
        }


@pytest.mark.parametrize("number", DEFERRED)
@pytest.mark.parametrize("warm", [False, True])
async def test_a_signal_to_one_rank_alone_ends_it(tmp_path: Path, number: int, warm: bool) -> None:
    async with opened(tmp_path, "hearing.py", "stay", warm=warm, preload=(), bare=True) as node:
        pids = await here(node, warm=warm)
        os.kill(pids[1], number)
        gone = await node.gone()
        assert [(event.rank, event.signal, event.was_told) for event in gone.values()] == [
            (1, signal.Signals(number).name, False)
        ]
        assert alive(pids[0])


@pytest.mark.parametrize("number", [*DEFERRED, *ANNOUNCE])
async def test_a_signal_to_all_ends_nobody_until_the_agent_says_so(
    tmp_path: Path, number: int
) -> None:
    async with opened(tmp_path, "hearing.py", "stay", warm=True, preload=(), bare=True) as node:
        pids = await here(node, warm=True)
        everybody = below(node.warden())
        for _ in range(3):
            tell_all(node, number)
        unhandled = await node.keeper.signal(signal.SIGUSR2)  # what came before it is settled
        assert unhandled == (0, 1)
        assert all(map(alive, everybody))
        if number in DEFERRED:
            await node.keeper.signal(number, (0,))
            gone = await node.gone()
            assert [event.signal for event in gone.values()] == [signal.Signals(number).name]
        assert alive(pids[1])


@pytest.mark.parametrize("warm", [False, True])
async def test_a_signal_to_handlers_ends_no_rank_without_one(tmp_path: Path, warm: bool) -> None:
    async with opened(tmp_path, "hearing.py", "stay", warm=warm, preload=(), bare=True) as node:
        pids = await here(node, warm=warm)
        assert await node.keeper.signal(signal.SIGTERM, to_handlers=True) == (0, 1)
        assert await node.keeper.signal(signal.SIGUSR2) == (0, 1)  # what came before it is settled
        assert all(map(alive, pids))


async def test_a_signal_to_handlers_is_heard_by_those_that_have_one(tmp_path: Path) -> None:
    async with opened(tmp_path, "hearing.py", "own") as node:
        await here(node)
        assert await node.keeper.signal(signal.SIGTERM, to_handlers=True) == ()
        await until_async(lambda: heard(node, 0) and heard(node, 1), "they have heard")
        assert heard(node) == [signal.SIGTERM]


@pytest.mark.parametrize("number", [*DEFERRED, *ANNOUNCE, signal.SIGINT])
async def test_a_handler_of_the_script_hears_a_signal_once(tmp_path: Path, number: int) -> None:
    async with opened(tmp_path, "hearing.py", "own") as node:
        pids = await here(node)
        tell_all(node, number)
        assert await node.keeper.signal(number) == ()  # the agent has got it, too, and passes it on
        await until_async(lambda: heard(node, 0) and heard(node, 1), "they have heard")
        os.kill(pids[0], signal.SIGUSR1)  # heard after whatever was sent before
        await until_async(lambda: signal.SIGUSR1 in heard(node, 0)[1:], "it has heard")
        assert heard(node, 0) == [number, signal.SIGUSR1]
        assert heard(node, 1) == [number]


async def test_the_agent_alone_has_them_hear_a_signal(tmp_path: Path) -> None:
    async with opened(tmp_path, "hearing.py", "own") as node:
        await here(node)
        assert await node.keeper.signal(signal.SIGTERM, (1,)) == ()
        await until_async(lambda: heard(node, 1), "it has heard")
        assert heard(node, 1) == [signal.SIGTERM]
        assert heard(node, 0) == []


async def test_a_rank_that_waits_inside_of_a_library_ends_at_once(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import ctypes\nprint('here', flush=True)\n"
        "ctypes.PyDLL(None).nanosleep((ctypes.c_long * 2)(600, 0), None)\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        await here(node, 1)
        done = await node.keeper.stop(grace_s=200)
        assert (done.ranks, done.killed) == ((0,), ())
        assert (await node.gone())[0].signal == "SIGTERM"
