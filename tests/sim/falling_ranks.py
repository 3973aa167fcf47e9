"""64 ranks of 8 nodes; one raises and the others fall: real agents' rules, a real job's.

Only time, the bus and the processes are made up. Each node has a clock of its own, hears of its
ranks in the order in which they end, asks one question at a time, and gets orders at any moment.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from everstep.messages import ErrorRecord, IncidentClosed, Joined, Report, Reported, StartRanks
from everstep_services.agent.core.actions import (
    Action,
    AskToJoin,
    SendReport,
    StopRound,
    StopWithoutWait,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.settings import AgentSettings
from everstep_services.rendezvous.domain.events import Event, Probed, Tick
from tests.unit.rendezvous.world import WALL, World, names, spec

NODES, RANKS = 8, 8
_SKEW_S = 300.0
_ENDS_WITHIN_S = 120.0
CAUSES = (
    ("ValueError", "a bug"),
    ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("AssertionError", "loss is nan at step 7"),
)
CONSEQUENCES = (
    ("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:4123"),
    ("RuntimeError", "Connection reset by peer"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 3"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /a"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete"),
)


class Falling:
    """One schedule: from the exception of one rank to the end of the incident."""

    def __init__(self, seed: int, *, leaves_s: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.raised = self.rng.randrange(NODES * RANKS)
        self.leaves_s = leaves_s
        """How long before its script is over a rank's connections close; 0: not until it exits."""
        self.world = World(
            spec(NODES, ranks_per_node=RANKS, max_restarts=0), last_call_s=_ENDS_WITHIN_S
        )
        self.world.join(*names(NODES), ranks=RANKS)
        self.world.run()
        self._began = self.world.now
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._orders = len(self.world.orders)
        self.nodes = {node: _Node(self, node) for node in names(NODES)}

    def run(self) -> IncidentClosed:
        """What is on record in the end."""
        self._fall()
        while not self.world.of(IncidentClosed):
            wake = self.world.last.wake_at
            at = self._queue[0][0] if self._queue else _ENDS_WITHIN_S
            if wake is not None and wake - self._began < at:
                self.now = max(self.now + 0.001, wake - self._began)
                self.apply(Tick())
            else:
                self.now, _, what = heapq.heappop(self._queue)
                what()
            assert self.now < _ENDS_WITHIN_S, f"{self.world.doc.phase}: {self.world.doc.reason}"
        (closed,) = self.world.of(IncidentClosed)
        return closed

    def later(self, after_s: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (self.now + after_s, next(self._numbers), what))

    def some_s(self, typical: float, most: float) -> float:
        """Mostly about this time, and now and then anything up to the most."""
        if self.rng.random() < 0.1:
            return self.rng.uniform(0.0, most)
        return min(self.rng.expovariate(1 / typical), most)

    def apply(self, event: Event) -> Any:
        """Rendezvous hears it; whom it orders something hears of it when it comes."""
        self.world.now = self._began + self.now
        outcome = self.world.apply(event)
        for to, order in self.world.orders[self._orders :]:
            for name in self.nodes if to is None else (to,):
                node = self.nodes[name]
                self.later(self.some_s(0.002, 2.0), partial(node.ordered, order))
        self._orders = len(self.world.orders)
        for probe in outcome.probes:
            there = Probed(probe.node, probe.instance, is_there=True)
            self.later(0.01, partial(self.apply, there))
        return outcome.replies[0] if outcome.replies else None

    def _fall(self) -> None:
        rng = self.rng
        closes_s = 0.0 if self.leaves_s else self.some_s(0.02, 0.3)
        ends_s = self._leaves_s()
        cause = _Fall(rng.choice(CAUSES), ends_s, max(ends_s, closes_s) + self.some_s(0.05, 5.0))
        for number in range(NODES * RANKS):
            at = closes_s + self.some_s(0.02, 3.0) + self._leaves_s()
            fall = _Fall(rng.choice(CONSEQUENCES), at, at + self.some_s(0.05, 5.0))
            if rng.random() < 0.1:
                fall.error = None  # C++ ends it
            if rng.random() < 0.1:
                fall.raises_s = fall.exits_s = _ENDS_WITHIN_S  # it waits for ever
            self.node_of(number).falls(number, cause if number == self.raised else fall)

    def _leaves_s(self) -> float:
        """From the exception, and the end of the connections, to the end of the script."""
        return self.rng.uniform(0.5, 1.5) * self.leaves_s

    def node_of(self, rank: int) -> "_Node":
        return self.nodes[self.world.members()[rank // RANKS]]


@dataclass
class _Fall:
    """When a rank's script raises what, and when its process is gone."""

    error: tuple[str, str] | None
    raises_s: float
    exits_s: float


class _Node:
    """An agent with its ranks."""

    def __init__(self, all_: Falling, name: str) -> None:
        self._all = all_
        self._name = name
        self._skew_s = all_.rng.uniform(-_SKEW_S, _SKEW_S)
        self._agent = Agent(AgentSettings())
        self._order = order = all_.world.order(name)
        self._agent.ordered(order)
        for rank in self._numbers:
            self._agent.rank_runs(rank)
        self._living = set(self._numbers)
        self._told = False
        self._tell_at = 0.0
        self._heard_at = 0.0
        self._questions: deque[SendReport | AskToJoin] = deque()
        self._is_asking = False

    @property
    def _numbers(self) -> range:
        return range(self._order.first_rank, self._order.first_rank + self._order.ranks)

    def falls(self, rank: int, fall: _Fall) -> None:
        if fall.error is not None:
            self._all.later(fall.raises_s, lambda: self._raises(rank, fall))
        self._all.later(fall.exits_s, lambda: self._exits(rank, fall))

    def ordered(self, order: Any) -> None:
        if not isinstance(order, StartRanks):
            self._do(self._agent.ordered(order))

    # -- its ranks -------------------------------------------------------------------------------

    def _raises(self, rank: int, fall: _Fall) -> None:
        if rank in self._living:
            told, ending = self._told, self._ending(fall)
            self._heard(lambda: self._script_failed(rank, ending, told=told))

    def _exits(self, rank: int, fall: _Fall) -> None:
        if rank in self._living:
            self._living.discard(rank)
            told, ending = self._told, self._ending(fall)
            self._heard(lambda: self._gone(rank, ending, told=told))

    def _heard(self, what: Callable[[], None]) -> None:
        """An agent hears one after the other, and may be late."""
        at = max(self._heard_at, self._all.now + self._all.some_s(0.001, 0.5))
        self._heard_at = at
        self._all.later(at - self._all.now, what)

    def _script_failed(self, rank: int, ending: RankExit, *, told: bool) -> None:
        """As `OwnRanks` does."""
        self._fails(rank, ending, self._agent.script_failed, told=told)

    def _gone(self, rank: int, ending: RankExit, *, told: bool) -> None:
        self._fails(rank, ending, self._agent.rank_gone, told=told)

    def _fails(
        self,
        rank: int,
        ending: RankExit,
        at_work: Callable[[int, RankExit], list[Action]],
        *,
        told: bool,
    ) -> None:
        if not told and self._agent.order is not None:
            is_stopping = self._agent.state == "stopping"
            self._do((self._agent.rank_fell if is_stopping else at_work)(rank, ending))

    def _ending(self, fall: _Fall) -> RankExit:
        if fall.error is None:
            return RankExit(signal="SIGABRT")
        name, text = fall.error
        at = WALL + timedelta(seconds=self._all.now + self._skew_s)
        return RankExit(code=1, error=ErrorRecord(name=name, text=text, at=at))

    def _stop(self, stop: StopRound) -> None:
        """Evidence first; then ranks get a signal, and those that are left are killed."""
        evidence_s = min(self._all.some_s(0.02, 0.3), stop.evidence_s)
        self._tell_at = self._all.now + evidence_s
        self._all.later(max(evidence_s, stop.wait_s), self._tell_ranks)

    def _hurry(self) -> None:
        self._all.later(max(self._tell_at - self._all.now, 0.0), self._tell_ranks)

    def _tell_ranks(self) -> None:
        if self._told:
            return
        self._told = True
        self._all.later(self._all.some_s(0.05, 3.0), self._all_stopped)

    def _all_stopped(self) -> None:
        self._living.clear()
        self._heard(lambda: self._do(self._agent.stopped(self._order.round)))

    # -- what it asks ----------------------------------------------------------------------------

    def _do(self, acts: list[Action]) -> None:
        for act in acts:
            match act:
                case SendReport() | AskToJoin():
                    self._questions.append(act)
                case StopRound():
                    self._stop(act)
                case StopWithoutWait():
                    self._hurry()
                case _:
                    pass
        self._ask()

    def _ask(self) -> None:
        """Reports first, in their order; now and then the bus is away."""
        if self._questions and not self._is_asking:
            self._is_asking = True
            self._all.later(self._all.some_s(0.003, 5.0), self._asked)

    def _asked(self) -> None:
        tells = [one for one in self._questions if isinstance(one, SendReport)]
        question = tells[0] if tells else self._questions[0]
        self._questions.remove(question)
        reply = self._all.apply(self._event(question))
        self._is_asking = False
        now = self._all.now + self._skew_s
        if isinstance(question, SendReport):
            assert isinstance(reply, Reported)
            self._do(self._agent.reported(question, reply, now))
        else:
            assert isinstance(reply, Joined)
            self._do(self._agent.joined(reply, now))

    def _event(self, question: SendReport | AskToJoin) -> Event:
        agent, world = self._agent, self._all.world
        if isinstance(question, AskToJoin):
            return world.ask(
                self._name, ranks=RANKS, last_round=agent.last_round, known_round=agent.round or 0,
                running=agent.order, running_state=agent.running_state,
            )  # fmt: skip
        ending = question.exit
        return Report(
            job="j", node=self._name, instance=f"{self._name}-1", slot=self._order.slot,
            round=question.round, event=question.event, reason=question.reason, rank=question.rank,
            fingerprint="" if ending is None else ending.fingerprint,
            exit_code=None if ending is None else ending.code,
        )  # fmt: skip
