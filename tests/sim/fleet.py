"""A job's agents, replicas and network, simulated: one seed, one schedule, the same every time."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from everstep.messages import (
    DrainNode,
    Exclusion,
    JobSpec,
    Join,
    Message,
    NodeLost,
    Order,
    RequestSave,
    RestartJob,
    RoundDocument,
    StartRanks,
    StopJob,
)
from everstep_services.rendezvous.domain.events import Event, JobControl, LivenessProbe, Now, Probed
from tests.sim.agents import FAULTS_END_S, PREEMPTED, Agent
from tests.sim.invariants import Record
from tests.sim.replicas import DECODER, Replica

WALL = datetime(2026, 1, 1, tzinfo=UTC)
_ENCODER = msgspec.json.Encoder()
CALM_AFTER_S = FAULTS_END_S
END_AFTER_S = 3000.0
FAULTS = (
    *["kill", "rank", "rank", "pause", "silent", "crash", "crash", "leave", "restart"],
    *["unhealthy", "exclude", "suspect", "drain", "stale_report", "twin", "first_step"],
    *["stall", "stall", "busy", "busy", "preempt", "save"],
)


class Fleet:
    """One schedule: what happens is drawn from the seed."""

    def __init__(self, seed: int, *, forgets: bool = False) -> None:
        self.forgets = forgets
        self.rng = random.Random(seed)
        self.of_tests = random.Random(f"network tests {seed}")
        self.of_moves = random.Random(f"moves {seed}")
        self.of_stops = random.Random(f"stops {seed}")
        self.slow_node = self.of_tests.choice(["", "n0", "n1", "n2"])
        self.now = 0.0
        self.revision = 0
        self.stored = b""
        self.control = JobControl()
        self.conflicts = 0
        self.crash_rate = 0.05
        self.late_rate = self.rng.choice([0.0, 0.05, 0.2])
        self.record = Record(self)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._steps = itertools.count(1)
        self.spec = self._spec()
        self.replicas = [Replica(self) for _ in range(self.rng.randint(1, 3))]
        self.agents: list[Agent] = []

    def _spec(self) -> JobSpec:
        rng, nodes = self.rng, self.rng.randint(1, 4)
        segment = rng.choice([1, 1, 1, 2])
        nodes += nodes % segment
        most = nodes + (segment * rng.randint(1, 2) if rng.random() < 0.3 else 0)
        is_grouped = segment > 1 and rng.random() < 0.5
        return JobSpec(
            name="j",
            labels={},
            command=("x",),
            config_fingerprint="f",
            nodes_min=nodes,
            nodes_max=most,
            ranks_per_node=1,
            slots_per_segment=1 if is_grouped else segment,
            slots_per_group=segment if is_grouped else 1,
            max_restarts=rng.choice([None, None, 2, 5]),
            max_restarts_per_hour=rng.choice([None, None, 3]),
            no_progress_limit=rng.choice([None, None, None, 3]),
            stop_grace_s=1.0,
            enforce=rng.choice([(), (), ("stop",)]),
            network_test=self.of_tests.choice(["off", "off", "first", "failures"]),
        )

    @property
    def segment(self) -> int:
        return max(self.spec.slots_per_segment, self.spec.slots_per_group)

    def domain_of(self, node: str) -> str:
        return f"d{int(node[1:]) % 2}" if self.segment > 1 else ""

    def group_of(self, node: str) -> str:
        return self.domain_of(node) if self.spec.slots_per_group > 1 else ""

    # -- time ------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), what))

    def later(self, seconds: float, what: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + seconds, lambda: what(*arguments))

    def moment(self) -> Now:
        wall = WALL + timedelta(seconds=self.now)
        return Now(self.now, wall, lambda: f"{self.rng.getrandbits(128):032x}")

    def next_step(self) -> int:
        return next(self._steps)

    def run(self) -> RoundDocument | None:
        """Faults until it is calm, then time for everything to come right."""
        count = self.spec.nodes_max + self.rng.randint(0, 2) * self.segment
        if self.segment > 1:
            count += 2
        for number in range(count):
            self.later(self.rng.uniform(0, 2), self.boot, f"n{number}")
        for _ in range(self.rng.randint(1, 8)):
            self.at(self.rng.uniform(1, CALM_AFTER_S), self.fault)
        if self.of_stops.random() < 0.15:
            self.at(self.of_stops.uniform(3, CALM_AFTER_S), self.stop_job)
        if self.forgets:
            self.at(self.rng.uniform(2, CALM_AFTER_S), self.forget)
        self.at(CALM_AFTER_S, self.calm)
        while self._queue and self.now < END_AFTER_S:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            if self.is_over and self.now > CALM_AFTER_S and not self._awake:
                break
        return self.document

    @property
    def document(self) -> RoundDocument | None:
        return DECODER.decode(self.stored) if self.stored else None

    @property
    def is_over(self) -> bool:
        return self.record.is_over

    @property
    def _awake(self) -> bool:
        return any(not agent.stays_paused for agent in self.alive)

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.is_alive]

    # -- network ---------------------------------------------------------------------------

    def delay(self) -> float:
        """Now and then a message is so late that many newer ones overtake it."""
        is_late = self.now < CALM_AFTER_S and self.rng.random() < self.late_rate
        return self.rng.expovariate(20.0) + (self.rng.uniform(0.3, 6.0) if is_late else 0.0)

    def is_lost(self) -> bool:
        return self.now < CALM_AFTER_S and self.rng.random() < 0.08

    def ask(
        self, question: Event, answered: Callable[[Message], None], sender: Agent | None = None
    ) -> None:
        """A question, asked again until it is answered; it may arrive more than once."""
        is_answered = False

        def reply(message: Message) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                answered(message)

        def attempt() -> None:
            if is_answered or (sender is not None and not sender.is_alive):
                return
            for _ in range(1 + (self.rng.random() < 0.05)):
                if not self.is_lost():
                    self.later(self.delay(), self._arrive, question, reply)
            if not isinstance(question, Join):
                self.later(1.0, attempt)

        attempt()

    def _arrive(self, question: Event, reply: Callable[[Message], None]) -> None:
        self.record.asks(question)
        found = self.rng.choice(self.replicas).decide([question])[0]
        self.record.asked(question, found)
        if found is not None and not self.is_lost():
            self.later(self.delay(), reply, found)

    def order(self, instance: str, order: Order) -> None:
        for agent in self.alive:
            if instance in {"", agent.instance} and not self.is_lost():
                for _ in range(1 + (self.rng.random() < 0.05)):
                    self.later(self.delay(), agent.hear, order)

    def probe(self, replica: Replica, probe: LivenessProbe) -> None:
        def ask() -> None:
            here = [agent for agent in self.alive if agent.instance == probe.instance]
            if not here:
                replica.decide([Probed(probe.node, probe.instance, is_there=False)])
                return
            awake = [agent for agent in here if not agent.is_paused]
            for agent in here:
                agent.hear(probe.order)
            if awake:
                replica.decide([Probed(probe.node, probe.instance, is_there=True)])

        self.later(self.delay(), ask)

    def write(self, replica: Replica, document: RoundDocument) -> bool:
        """Compare and set."""
        if replica.revision != self.revision:
            return False
        data = _ENCODER.encode(document)
        self.revision += 1
        self.stored, replica.revision = data, self.revision
        self.record.written(document)
        for other in self.replicas:
            if other is not replica:
                self.later(self.delay() * self.rng.choice([1, 1, 10]), other.news)
        return True

    # -- what goes wrong -------------------------------------------------------------------

    def boot(self, node: str) -> None:
        agent = Agent(self, node, f"{node}-{self.rng.getrandbits(40):010x}")
        self.agents.append(agent)
        agent.join_for_ever()

    def fault(self) -> None:
        kind = self.rng.choice(FAULTS)
        if kind == "crash":
            self.rng.choice(self.replicas).restart()
            return
        alive = self.alive
        if alive:
            getattr(self, f"_{kind}")(self.rng.choice(alive))

    def _kill(self, agent: Agent) -> None:
        """With all its ranks: its peers' ranks fail soon, or health misses it a little later."""
        agent.is_alive = False
        if agent.order is not None:
            peer = self.rng.choice(self.alive or [agent])
            self.later(self.rng.uniform(0.1, 1.0), peer.fail)
        self.later(4.0, self._silent, agent)
        if self.rng.random() < 0.7:
            self.later(self.rng.uniform(0.1, 8), self.boot, agent.node)

    def _rank(self, agent: Agent) -> None:
        agent.fail()

    def _pause(self, agent: Agent) -> None:
        agent.is_paused = True
        self.later(self.rng.uniform(0.5, 20), agent.wake)

    def _silent(self, agent: Agent) -> None:
        """A finding of health; the agent may be there all the same."""
        finding = NodeLost(
            id=f"{self.rng.getrandbits(128):032x}",
            job="j",
            at=WALL,
            source="health",
            node=agent.node,
            silence_s=4,
            limit_s=0.5,
            reason="silent",
        )
        for replica in self.replicas:
            self.later(self.delay(), replica.decide, [finding])
        if (not agent.is_alive or agent.is_paused) and self._is_seated(agent):
            self.later(1.0, self._silent, agent)

    def _is_seated(self, agent: Agent) -> bool:
        seats = () if self.document is None else self.document.seats
        return any(seat.instance == agent.instance for seat in seats)

    def miss(self, agent: Agent) -> None:
        """Health misses an agent that has left, if a question of it was heard after its goodbye."""
        if self._is_seated(agent):
            self._silent(agent)

    def _leave(self, agent: Agent) -> None:
        agent.exit(0)
        self.later(self.rng.uniform(0.1, 8), self.boot, agent.node)

    def _restart(self, _: Agent) -> None:
        document = self.document
        if document is not None:
            asked = RestartJob(
                job="j", by="ann", reason="why not", round=document.round, save_first=False
            )
            self.rng.choice(self.replicas).decide([asked])

    def _unhealthy(self, agent: Agent) -> None:
        agent.is_unhealthy = True
        self.later(self.rng.uniform(1, 20), setattr, agent, "is_unhealthy", False)

    def _exclude(self, agent: Agent) -> None:
        until = WALL + timedelta(seconds=self.now + self.rng.uniform(1, 20))
        found = Exclusion(node=agent.node, by="ann", reason="why not", until=until)
        self.control = replace(self.control, exclusions=(*self.control.exclusions, found))

    def _suspect(self, agent: Agent) -> None:
        suspects = {**self.control.suspects, agent.node: "three strikes"}
        self.control = replace(self.control, suspects=suspects)

    def _drain(self, agent: Agent) -> None:
        asked = DrainNode(job="j", node=agent.node, by="ann", reason="why not")
        self.rng.choice(self.replicas).decide([asked])
        self.later(10.0, self.boot, f"n{len(self.agents) * 2 + int(agent.node[1:]) % 2}")

    def _stall(self, agent: Agent) -> None:
        """For good."""
        if agent.order is not None and not agent.running_state:
            agent.has_stalled = True
            agent.stall(agent.order)

    def _busy(self, agent: Agent) -> None:
        """One works on for long, and another one, that waits for it, is past its limit."""
        others = [one for one in self.alive if one is not agent and one.order is not None]
        if agent.order is None or agent.running_state or not others:
            return
        waits = self.rng.choice(others)
        if waits.order is None or waits.running_state or waits.order.round != agent.order.round:
            return
        lasts_s = self.rng.uniform(2, 20)
        agent.busy_until = self.now + lasts_s
        waits.has_stalled = True
        waits.stall(waits.order)
        self.later(lasts_s, waits.recover, waits.order)

    def _preempt(self, agent: Agent) -> None:
        """It has time to save; then it goes, saved or not, and another one comes for it."""
        order = agent.order
        if order is None:
            return
        agent.report(order, "preempted", grace_s=10.0)
        self.later(10.0, self._taken, agent)

    def _taken(self, agent: Agent) -> None:
        if agent.is_alive:
            agent.exit(PREEMPTED if agent.running_state == "stopped" else 143, "preempted")
        self.later(self.rng.uniform(0.1, 8), self.boot, f"n{len(self.agents) + 200}")

    def _save(self, _: Agent) -> None:
        asked = RequestSave(job="j", by="ann", reason="why not")
        self.rng.choice(self.replicas).decide([asked])

    def _stale_report(self, agent: Agent) -> None:
        if agent.order is not None:
            older = StartRanks(
                **(msgspec.structs.asdict(agent.order) | {"round": agent.order.round - 1})
            )
            agent.report(older, "rank_exited")

    def _twin(self, agent: Agent) -> None:
        """Somebody starts a second agent with the same name, and gives up after a while."""
        self.boot(agent.node)
        twin = self.agents[-1]
        self.later(8.0, self._end_twin, twin)

    def _end_twin(self, twin: Agent) -> None:
        if twin.is_alive and twin.order is None:
            twin.is_alive = False

    def _first_step(self, agent: Agent) -> None:
        if agent.order is not None:
            agent.step(agent.order)

    def forget(self) -> None:
        """The bus comes back with an empty store: everybody says again what they know."""
        self.revision += 1
        self.record.forgotten(self.document)
        self.stored = b""
        for replica in self.replicas:
            replica.restart()
        for agent in self.alive:
            if not agent.is_paused:
                self.later(self.rng.uniform(0, 2), agent.ask_join)

    def calm(self) -> None:
        """From now on nothing goes wrong, and there are nodes enough."""
        self.crash_rate = 0.0
        self.control = JobControl()
        for agent in self.alive:
            agent.is_unhealthy = False
            if agent.is_paused and self.rng.random() < 0.5:
                agent.wake()
            elif agent.is_paused:  # for ever: it holds its connection, and does not answer
                agent.stays_paused = True
                self.later(4.0, self._silent, agent)
        for number in range(100, 101 + self.spec.nodes_min + self.segment):
            if self.is_over:
                break
            self.later(1.0, self.boot, f"n{number}")

    def stop_job(self) -> None:
        """A person stops the job, and its ranks may save first."""
        asked = StopJob(job="j", by="ann", reason="enough", save_first=True)
        self.of_stops.choice(self.replicas).decide([asked])
        self.later(self.of_stops.uniform(0, 2), self.fault)
