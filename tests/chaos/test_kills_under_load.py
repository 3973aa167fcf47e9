"""Server, history and publisher killed at random under load: no fact lost, none twice."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sized
from operator import not_
from pathlib import Path

import pytest

from everstep.bus import BusSettings, connect, topology
from everstep.bus.errors import BusError
from everstep.bus.server.dev_server import DevServer, dev_server
from tests.processes import Make, Process, history, in_sql, kept_running
from tests.waiting import until_async

ALIVE_WITHIN_S = 240.0
"""On a busy machine a killed history needs more than a minute until it writes again."""
ARRIVED_WITHIN_S = 480.0
"""Meanwhile the publisher goes on, and all of that is written at the end."""


def recorder(nats: DevServer, folder: Path) -> Make:
    login = nats.settings("service").credentials_file

    async def make() -> Process:
        script = Path(__file__).with_name("recorder.py")
        return await asyncio.create_subprocess_exec(
            *[sys.executable, str(script), nats.url, str(login), str(folder)]
        )

    return make


def acknowledged(folder: Path) -> set[str]:
    text = (folder / "acknowledged").read_text()
    return set(text[: text.rfind("\n") + 1].split())


async def grown(read: Callable[[Path], Sized], folder: Path, by: int) -> None:
    """Until there is more of something: every part that it takes is alive again."""

    def size() -> int:
        return len(read(folder)) if (folder / "acknowledged").exists() else 0

    goal = await asyncio.to_thread(size) + by
    await until_async(
        lambda: asyncio.to_thread(size),
        f"{goal} from {read.__name__}",
        holds=lambda found: found >= goal,
        within_s=ALIVE_WITHIN_S,
    )


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, marks=pytest.mark.timeout(600)),
        pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)]),
    ],
)
async def test_no_acknowledged_fact_is_lost_and_none_is_there_twice(
    tmp_path: Path, kills: int
) -> None:
    """Fifty kills, each at a random moment (A14.1)."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    dice = random.Random(seed)
    victims: Counter[str] = Counter()
    async with dev_server(tmp_path) as nats:
        async with connect(nats.settings("admin"), "setup") as bus:
            await topology.init(bus.jetstream)
        async with (
            kept_running(history(nats, tmp_path)) as projector,
            kept_running(recorder(nats, tmp_path)) as publisher,
        ):
            await grown(in_sql, tmp_path, 1)
            for _ in range(kills):
                victim = dice.choice(["nats-server", "history", "publisher"])
                victims[victim] += 1
                pids = {
                    "nats-server": nats.pid,
                    "history": projector[0].pid,
                    "publisher": publisher[0].pid,
                }
                try:
                    os.kill(pids[victim], signal.SIGKILL)
                except ProcessLookupError:
                    continue  # between two lives
                await grown(acknowledged, tmp_path, dice.randrange(1, 200))
                if dice.random() < 0.3:  # else the next one dies while this one is away
                    await grown(in_sql, tmp_path, 1)
            (tmp_path / "quiet").touch()
            publisher[0].kill()  # what waits in its spool is sent by its next life
            await everything_arrived(nats, tmp_path)
    found = in_sql(tmp_path)
    print(
        f"killed {dict(victims)}; acknowledged {len(acknowledged(tmp_path))}, in SQL {len(found)}"
    )
    assert not acknowledged(tmp_path) - set(found)
    assert max(found.values()) == 1


async def everything_arrived(nats: DevServer, folder: Path) -> None:
    """Until SQL has all that was acknowledged, on a server that works all the time."""
    settings: BusSettings = nats.settings("service")

    async def missing() -> set[str]:
        async with connect(settings, "watch") as bus:
            await bus.prove()
        return await asyncio.to_thread(lambda: acknowledged(folder) - set(in_sql(folder)))

    await until_async(
        missing,
        "SQL has all that was acknowledged",
        holds=not_,
        despite=BusError,
        within_s=ARRIVED_WITHIN_S,
    )
