"""A real warden answers whether it lives: to who knows its token, and for as long as it does."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from everstep.messages import WardenPlace
from everstep_services.agent.ranks.protocol import NodePlan
from everstep_services.agent.ranks.warden_client import held_folder, opened_warden
from everstep_services.agent.runtime.beat_sender import who_lives
from tests.waiting import until_async
from trainer_sdk.wire import RankCommand


def plan(folder: Path, address: str) -> NodePlan:
    return NodePlan(
        instance="door",
        runtime_dir=folder / "agent",
        command=RankCommand(kind="program", target="true"),
        cwd=folder,
        python="python",
        environ=dict(os.environ),
        warm=False,
        address=address,
    )


def wardens() -> set[int]:
    """Those of this process; of earlier tests, some may still be on their way out."""
    found = set()
    for one in psutil.Process().children():
        with suppress(psutil.Error):
            if any("agent.ranks.warden" in word for word in one.cmdline()):
                found.add(one.pid)
    return found


async def test_a_warden_answers_for_as_long_as_it_lives(tmp_path: Path) -> None:
    made, others = plan(tmp_path, "127.0.0.1"), wardens()
    async with held_folder(made) as lock, opened_warden(made, lock) as keeper:
        door = keeper.door
        assert door is not None
        (warden,) = wardens() - others
        place = WardenPlace(node="n", address=door.address, port=door.port, token=door.token)
        stranger = WardenPlace(node="s", address=door.address, port=door.port, token="guessed")
        await until_async(lambda: who_lives([place]), "it answers")
        await until_async(
            lambda: who_lives([stranger, place]),
            "only its friend is answered",
            holds=lambda found: found == ("n",),
        )
        os.kill(warden, signal.SIGSTOP)
        assert await who_lives([place]) == ()
        os.kill(warden, signal.SIGCONT)
        await until_async(lambda: who_lives([place]), "it answers again")
        os.kill(warden, signal.SIGKILL)
        assert await who_lives([place]) == ()
        await until_async(lambda: keeper.door is None, "its agent tells nobody of it any more")


async def test_where_no_door_can_be_opened_nobody_is_told_of_one(tmp_path: Path) -> None:
    made = plan(tmp_path, "")
    async with held_folder(made) as lock, opened_warden(made, lock) as keeper:
        assert keeper.door is None


async def test_what_cannot_be_reached_does_not_live() -> None:
    places = [
        WardenPlace(node="a", address="no such name", port=1, token="t"),
        WardenPlace(node="b", address="127.0.0.1", port=70000, token="t"),
        WardenPlace(node="c", address="127.0.0.1", port=1, token="t"),
    ]
    assert await who_lives(places) == ()
