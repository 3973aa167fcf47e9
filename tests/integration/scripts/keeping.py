"""Agents that are killed at counted points of keeping states, and what is there after each.

`keeping.py FOLDER N SEED`: in each play one rank's state goes from its owner's agent to a holder,
which drops the one before; a third agent fetches it, and cleans up. One of the three is killed at
an operation on files or connections, until N were; then the others are, as when a node is lost
whose memory remains. Says as JSON who was killed, and what was wrong after any of them.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any, NoReturn

from xxhash import xxh3_128_hexdigest

from everstep.clock import SystemClock
from everstep.messages import Fact, Peer, ReplicaStored, StartRanks
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.replicas.node_states import opened_states
from everstep_services.agent.replicas.transfer.fetcher import OFFER
from everstep_services.agent.replicas.transfer.protocol import ReplicaLink
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.run.plan import plan_run
from tests.integration.replicas.nodes import JOB, order, patient, save_image
from tests.waiting import until_async
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode

NODES = ("owner", "holder", "taker")
MOST = {"owner": 40, "holder": 60, "taker": 60}
"""The number of operations that each of them needs, or a few less."""
SPARED = 1_000_000
WITHIN_S = 60.0
SIZE = 1_300_000
ON_FILES = ("open", "pwrite", "ftruncate", "mkdir", "rename", "unlink", "rmdir")
ON_LINKS = ("send", "_fill")
AT_WORK = {"incoming", "coded", f".{INDEX}", ".part.json"}
"""What an agent that begins leaves of the one before it: none of these."""


# -- one agent -------------------------------------------------------------------------------------


def arm(point: int) -> None:
    """Have this process killed before its n-th such operation."""
    counter = itertools.count(1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*arguments: Any, **named: Any) -> Any:
            if next(counter) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return count_and_call

    for owner, names in ((os, ON_FILES), (ReplicaLink, ON_LINKS)):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


@asynccontextmanager
async def agent(plan: RunPlan, said: int) -> AsyncIterator[tuple[NodeCheckpoints, Path]]:
    """All that an agent does about states."""
    async with opened_states(plan, SystemClock()) as states:
        assert states is not None

        def record(fact: Fact) -> None:
            if isinstance(fact, ReplicaStored):
                os.write(said, f"stored {fact.round}\n".encode())

        records = AgentFacts(plan.job, plan.node, SystemClock())
        desk = NodeCheckpoints(records, SystemClock(), record, states)
        os.write(said, f"port {desk.port}\n".encode())
        keeping = asyncio.create_task(desk.keep_for_ever())
        try:
            yield desk, states.folder
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            states.agent_ends(0)  # the job is done, so that nothing may be left


async def be_agent(plan: RunPlan, orders: StartRanks, said: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with agent(plan, said) as (desk, folder):
        desk.begins(orders)
        if plan.node != "taker":
            await asyncio.Event().wait()
        await until_async((folder / OFFER).exists, "it has fetched")
        offer = json.loads((folder / OFFER).read_bytes())
        os.write(said, f"offered {int(offer['complete'])}\n".encode())


def run_agent(plan: RunPlan, orders: StartRanks, said: int, point: int) -> NoReturn:
    arm(point)
    try:
        asyncio.run(be_agent(plan, orders, said))
    except asyncio.CancelledError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


# -- all of them -----------------------------------------------------------------------------------


class EndedError(Exception):
    """One of the agents is no more."""


@dataclass
class Agent:
    """A process of ours."""

    pid: int
    hears: int
    heard: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False

    def listen(self) -> None:
        """What it says next, or that it has ended."""
        octets = os.read(self.hears, 1 << 12)
        for line in octets.decode().splitlines():
            word, _, what = line.partition(" ")
            self.heard[word] = what
        self.has_ended = not octets

    def end(self, how: int) -> int:
        """Its exit status."""
        os.kill(self.pid, how)
        while not self.has_ended:
            self.listen()
        os.close(self.hears)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Job:
    """Three nodes, each with a memory of its own, and what is known of their states."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._plans = {name: plan_of(base, name) for name in NODES}
        self._agents: dict[str, Agent] = {}
        self._round = 0
        """There is one state in each; every other one has the step of the one before."""
        self._stored = 0
        """The newest that the holder has called whole."""
        self.wrong: list[str] = []

    def play(self, victim: str = "", point: int = SPARED, *, how: int = signal.SIGKILL) -> bool:
        """One state on its way; whether the victim was killed meanwhile. Then all are ended."""
        self._round = number = self._round + 1
        save_image(
            self._images("owner"), 0, number // 2, buffer="ab"[number % 2], round=number,
            size=SIZE + number % 3,
        )  # fmt: skip
        what = f"round {number}, {victim} at {point}"
        try:
            self._send_and_fetch({victim: point}, what)
        except EndedError:
            ended = {name for name, one in self._agents.items() if one.has_ended}
            if ended != {victim}:
                self.wrong.append(f"{what}: {ended} have ended")
        finally:
            statuses = {name: one.end(how) for name, one in self._agents.items()}
        self._stored = max(self._stored, int(self._agents["holder"].heard.get("stored", 0)))
        self._agents.clear()
        if how == signal.SIGKILL:
            self._look(what)
        return statuses.get(victim) == -signal.SIGKILL

    def left(self) -> list[str]:
        """All that is in the memories."""
        return sorted(str(one) for one in self._base.glob(f"*/everstep-{os.getuid()}/images/*"))

    def _send_and_fetch(self, points: dict[str, int], what: str) -> None:
        def start(name: str, orders: StartRanks) -> None:
            self._agents[name] = self._start(name, orders, points.get(name, SPARED))

        start("holder", order(1, round=self._round))
        port = int(self._hear("holder", "port"))
        at_work = [one for one in self._images("holder").rglob("*") if one.name in AT_WORK]
        if at_work:
            self.wrong.append(f"{what}: the holder has left {at_work}")
        peer = Peer(node="holder", slot=1, address="127.0.0.1", port=port)
        start("owner", order(0, round=self._round, peers=[peer]))
        self._hear("holder", "stored")
        start("taker", order(0, round=self._round, sources=[peer]))
        if self._hear("taker", "offered") != "1":
            self.wrong.append(f"{what}: nothing was fetched")
        while not self._agents["taker"].has_ended:
            self._agents["taker"].listen()

    def _start(self, name: str, orders: StartRanks, point: int) -> Agent:
        hearing, saying = os.pipe()
        pid = os.fork()
        if not pid:
            run_agent(self._plans[name], orders, saying, point)
        os.close(saying)
        return Agent(pid, hearing)

    def _hear(self, name: str, word: str) -> str:
        """What one of them says; `EndedError` when any has ended before."""
        while word not in self._agents[name].heard:
            hearing = {one.hears: one for one in self._agents.values()}
            ready, _, _ = select(hearing, (), (), WITHIN_S)
            assert ready, f"{name} has not said {word} within {WITHIN_S:g} s"
            for one in ready:
                hearing[one].listen()
                if hearing[one].has_ended:
                    raise EndedError
        return self._agents[name].heard[word]

    def _images(self, name: str) -> Path:
        return self._base / name / f"everstep-{os.getuid()}" / "images" / f"{JOB}@{name}"

    def _look(self, what: str) -> None:
        """Whatever can be seen is whole, and nothing that was there before is lost."""
        own, held, _ = (self._whole(name, what) for name in NODES)
        if max(own, default=0) < self._round:
            self.wrong.append(f"{what}: the owner had {self._round}, and has {own}")
        if max(held, default=0) < self._stored:
            self.wrong.append(f"{what}: the holder had {self._stored}, and has {held}")

    def _whole(self, name: str, what: str) -> list[int]:
        """The rounds of all states that can be seen."""
        found = []
        for path in self._images(name).rglob(INDEX):
            index = decode(path.read_bytes(), ImageIndex, str(path))
            octets = path.with_name(IMAGE).read_bytes()[: index.size_bytes]
            if xxh3_128_hexdigest(octets) != index.hash:
                self.wrong.append(f"{what}: {path} can be seen, and is not what it says")
            found.append(index.identity.round)
        return found


def plan_of(base: Path, node: str) -> RunPlan:
    memory = base / node
    memory.mkdir(parents=True)
    environ = {
        "HOME": str(base),
        "EVERSTEP_AGENT__CHECKPOINTS__MEMORY_DIR": str(memory),
        "EVERSTEP_AGENT__CHECKPOINTS__ROOM_LEAST_BYTES": "0",
        "EVERSTEP_AGENT__CHECKPOINTS__SILENT_S": "30",
    }
    words = ("--job", JOB, "--node-id", node, "--nnodes", "2", "--bus-url", "nats://127.0.0.1:1")
    return plan_run(Invocation(environ=environ), scan((*words, __file__), environ))


def main(base: Path, kills: int, seed: int) -> None:
    chance, job = random.Random(seed), Job(base)
    killed, victims = Counter[str](), itertools.cycle(NODES)
    while killed.total() < kills:
        victim = next(victims)
        killed[victim] += job.play(victim, chance.randint(1, MOST[victim]))
    job.play(how=signal.SIGTERM)
    print(json.dumps({"killed": killed, "wrong": job.wrong, "left": job.left()}))


if __name__ == "__main__":
    with patient():
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
