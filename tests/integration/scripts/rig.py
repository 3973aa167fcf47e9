"""A keeper of a test's own, with its folder, and what a test asks of it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from everstep_services.agent.ranks.protocol import (
    NodePlan,
    Preload,
    RankGone,
    WardenEvent,
    rank_folder,
)
from everstep_services.agent.ranks.warden_client import WardenClient, held_folder, opened_warden
from tests.e2e.ports import free_port
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.wire import RankCommand, RankEntry, WardenStart

E = TypeVar("E")
SCRIPTS = Path(__file__).parent
WITHIN_S = 120


class Node:
    """One keeper; rounds are numbered from 1."""

    def __init__(self, keeper: WardenClient, plan: NodePlan) -> None:
        self.keeper = keeper
        self.plan = plan
        self.round = self.first = 0
        self.seen: list[WardenEvent] = []
        self.forge_within_s = 60.0

    @property
    def folder(self) -> Path:
        return self.plan.runtime_dir

    async def start(self, ranks: int = 1, *, warm: bool = False, **extra: str) -> float:
        """Start this number of ranks; return when that was."""
        self.round += 1
        shared = {
            **self.plan.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **extra,
        }
        plans = tuple(
            RankEntry(
                rank=rank,
                environ={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank - self.first)},
                stdout=str(self.folder / f"{self.round}-{rank}.out"),
                stderr=str(self.folder / f"{self.round}-{rank}.err"),
            )
            for rank in range(self.first, self.first + ranks)
        )
        began = asyncio.get_running_loop().time()
        order = WardenStart(
            round=self.round, ranks=plans, warm=warm, forge_within_s=self.forge_within_s
        )
        await self.keeper.start(order)
        return began

    async def next(self, kind: type[E], count: int = 1) -> list[E]:
        """The next `count` events of a kind; others are kept for later calls."""
        found: list[E] = []
        waiting, self.seen = self.seen, []
        async with asyncio.timeout(WITHIN_S):
            while len(found) < count:
                event = waiting.pop(0) if waiting else await self.keeper.events.get()
                if isinstance(event, kind):
                    found.append(event)
                else:
                    self.seen.append(event)
        self.seen.extend(waiting)
        return found

    async def gone(self, count: int = 1) -> dict[int, RankGone]:
        return {event.rank: event for event in await self.next(RankGone, count)}

    def rank_folder(self, rank: int = 0) -> Path:
        return rank_folder(self.folder, self.round, rank)

    def out(self, rank: int = 0) -> str:
        return (self.folder / f"{self.round}-{rank}.out").read_text()

    def err(self, rank: int = 0) -> str:
        return (self.folder / f"{self.round}-{rank}.err").read_text()

    def warden(self) -> int:
        """The warden's process id; it has opened its lock soon after it has begun."""
        (pid,) = until(
            lambda: [pid for pid in below(os.getpid(), deep=False) if self.is_warden(pid)],
            "one warden",
            holds=lambda here: len(here) == 1,
        )
        return pid

    def is_warden(self, pid: int) -> bool:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        lock = os.stat(self.folder / "lock").st_ino
        return b"agent.ranks.warden" in command and lock in inodes(pid)

    def forge(self) -> int:
        """The forge's process id."""
        children = below(self.warden(), deep=False)
        log = os.stat(self.folder / "forge.log").st_ino
        here = [pid for pid in children if log in inodes(pid)]
        assert len(here) == 1, here
        return here[0]

    def left(self) -> list[int]:
        """Every living process that belongs to this agent."""
        return tagged(self.plan.instance)


def inodes(pid: int) -> set[int]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
        except OSError:
            continue
    return found


def tagged(instance: str) -> list[int]:
    tag = f"{layout.INSTANCE_VARIABLE}={instance}".encode()
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and tag in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def below(pid: int, *, deep: bool = True) -> list[int]:
    """The processes below one; found by somebody else's code than that which kills them."""
    return [process.pid for process in psutil.Process(pid).children(recursive=deep)]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def make_plan(folder: Path, script: str, *arguments: str, **changes: Any) -> NodePlan:
    """With `bare`, a forge imports nothing large in the place of torch."""
    target = changes.pop("target", str(SCRIPTS / script))
    environ = {name: value for name, value in os.environ.items() if "EVERSTEP" not in name}
    environ = {**environ, "OMP_NUM_THREADS": "1", **changes.pop("environ", {})}
    if changes.pop("bare", False):
        environ["PYTHONPATH"] = str(SCRIPTS.parent / "warden/bare_torch")
    for name in ("PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"):
        environ.pop(name, None)
    preload: Preload = changes.pop("preload", "auto")
    return NodePlan(
        instance=folder.name + str(os.getpid()),
        runtime_dir=folder / "agent",
        command=RankCommand(kind=changes.pop("kind", "script"), target=target, arguments=arguments),
        cwd=changes.pop("cwd", SCRIPTS),
        python=sys.executable,
        environ=environ,
        warm=changes.pop("warm", False),
        preload=preload,
    )


@asynccontextmanager
async def opened(folder: Path, script: str, *arguments: str, **changes: Any) -> AsyncIterator[Node]:
    plan = make_plan(folder, script, *arguments, **changes)
    async with held_folder(plan) as lock, opened_warden(plan, lock) as keeper:
        yield Node(keeper, plan)
