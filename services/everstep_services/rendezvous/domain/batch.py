"""A batch of events during its decision: the state it reads, and the decisions so far."""

from dataclasses import dataclass, field
from typing import TypedDict, assert_never

from everstep.incident_causes import CONSEQUENCE, meaning_of
from everstep.messages import (
    AwaitRound,
    Fact,
    LeaveJob,
    Order,
    Seat,
    StallLocated,
    StandBy,
    StopRanks,
)
from everstep.messages.codec import encode
from everstep.messages.facts.stamp import FactStamp, JobFactHead, RoundFactHead
from everstep_services.rendezvous.domain.events import JobControl, LivenessProbe, Now, Send
from everstep_services.rendezvous.domain.state import OVER, JobState, Phase
from everstep_services.rendezvous.domain.timers import StartTimes, Timers
from everstep_services.rendezvous.settings import RendezvousSettings


class ReplicaMemory:
    """The observations of one replica by its own clock; its successor starts without them."""

    def __init__(self) -> None:
        self.started: StartTimes = {}
        """When each timer was started."""
        self.heard: dict[str, float] = {}
        """When each agent, by instance, was last heard."""
        self.answered: dict[str, float] = {}
        """When each agent, by instance, last answered a probe."""
        self.probed: dict[str, float] = {}
        """When each agent, by instance, was last probed."""
        self.unsaved: dict[str, int] = {}
        """How many ranks of each agent, by instance, are parked and have not saved."""
        self.alike: tuple[int, str, set[int]] = (0, "", set())
        """A round, the fingerprint of its failure, and the ranks that failed in that way."""
        self.located: StallLocated | None = None
        """Where the newest stall began, as health has seen it."""
        self.slowest = ""
        """The node whose ranks started last."""

    def failed_alike(self, round: int, fingerprint: str, rank: int) -> None:
        """Count a failed rank with the ranks of its round that failed in the same way."""
        if self.alike[:2] != (round, fingerprint):
            self.alike = (round, fingerprint, set())
        self.alike[2].add(rank)


class OrderHead(TypedDict):
    """What every order has, besides its reason."""

    id: str
    job: str
    round: int


@dataclass(slots=True)
class Batch:
    """Decisions change its state, and add facts and orders to it."""

    state: JobState
    memory: ReplicaMemory
    timers: Timers
    now: Now
    settings: RendezvousSettings
    control: JobControl
    version: str
    sends: list[Send] = field(default_factory=list)
    probes: list[LivenessProbe] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def head(self) -> JobFactHead:
        """The head of a new fact about the job, in its current round if there is one."""
        return {**self._stamp().head(self.state.doc.job), "round": self.state.doc.round or None}

    def round_head(self, round: int | None = None) -> RoundFactHead:
        """The head of a new fact about a round; by default the current one."""
        number = self.state.doc.round if round is None else round
        return {**self._stamp().head(self.state.doc.job), "round": number}

    def order_head(self, id: str) -> OrderHead:
        """The head of an order in the current round; of one that was never sent without an id."""
        return {"id": id or "0" * 32, "job": self.state.doc.job, "round": self.state.doc.round}

    def _stamp(self) -> FactStamp:
        return FactStamp(self.now.wall, self.now.new_id, "rendezvous")

    def record(self, fact: Fact) -> str:
        """Add a fact, recorded once the document that holds it is written; return its id."""
        self.state.outbox[encode(fact).decode()] = fact
        self.state.is_changed = True
        return fact.id

    def enter(self, phase: Phase, reason: str) -> None:
        """Enter another phase of the job."""
        self.state.set(phase=phase, reason=reason, phase_since=self.now.wall, waiting="")
        self.timers.start("phase", self.state.doc.round, phase)

    def send(self, order: Order, to: Seat | None = None) -> None:
        """Give an order to one agent, or to all."""
        if to is None:
            self.sends.append(Send(None, "", order))
        else:
            self.sends.append(Send(to.node, to.instance, order))

    def wake_in(self, seconds: float) -> None:
        """Ask for a `Tick` then."""
        self.wakes.append(self.now.s + max(seconds, 0.0))

    def forget_agent(self, instance: str) -> None:
        """Forget the observations of an agent that is gone."""
        memory = self.memory
        for times in (memory.heard, memory.answered, memory.probed):
            times.pop(instance, None)
        memory.unsaved.pop(instance, None)
        self.timers.clear("rival", instance)

    @property
    def phase_s(self) -> float:
        """Return the seconds since the phase began."""
        doc = self.state.doc
        return self.timers.elapsed("phase", doc.round, doc.phase)

    @property
    def join_within_s(self) -> float:
        """How long a round may take to form."""
        asked = self.state.doc.spec.join_within_s
        return self.settings.join_within_s if asked is None else asked

    def evidence_s(self, cause: str) -> float:
        """How long agents may collect evidence after a round that ended by `cause`."""
        evidence = meaning_of(cause).evidence
        match evidence:
            case "none":
                return 0.0
            case "crash":
                return self.settings.crash_evidence_s
            case "stall":
                return self.settings.stall_evidence_s
            case _:
                assert_never(evidence)

    def order_for(self, seat: Seat) -> Order:
        """Return the last order of this agent."""
        doc, state = self.state.doc, self.state
        if doc.phase in OVER:
            return self.leave_order()
        if seat.stage in {"starting", "running", "finished"}:
            return state.start_order(seat)
        if seat.stage == "stopping":
            return self.stop_order()
        return StandBy(**self.order_head(doc.start_order or doc.stop_order), reason=doc.reason)

    def say_waiting(self, key: str, reason: str) -> None:
        """Tell all agents why no round forms now; `key` stays the same until the reason changes."""
        self.state.set(waiting=key, reason=reason)
        order = self.await_order()
        assert order is not None
        self.send(order)

    def await_order(self) -> AwaitRound | None:
        """Return the order that explains why no round forms, if one was sent to all."""
        doc = self.state.doc
        if not doc.waiting:
            return None
        return AwaitRound(**self.order_head(doc.stop_order), reason=doc.reason)

    def stop_order(self) -> StopRanks:
        """Return the order that ends this round, as sent to all."""
        doc = self.state.doc
        cause = doc.incident.trigger if doc.incident else "operator"
        return StopRanks(
            **self.order_head(doc.stop_order),
            reason=doc.end_reason or doc.reason,
            cause=cause,
            incident=doc.incident.id if doc.incident else None,
            evidence_s=self.evidence_s(cause),
            grace_s=self.state.doc.spec.stop_grace_s,
            cause_within_s=self._ranks_end_within_s,
            check=doc.incident.check if doc.incident else "",
            accused=doc.incident.accused if doc.incident else (),
            weight=doc.incident.weight if doc.incident else 0,
            are_kept=doc.are_kept,
        )

    @property
    def _ranks_end_within_s(self) -> float:
        """Return how long ranks may end by themselves, so that their exits can be compared."""
        if self.is_compared:
            return self.settings.alike_within_s
        return self.settings.cause_within_s if self.is_unexplained else 0.0

    @property
    def is_compared(self) -> bool:
        """Whether to compare failures: a wrong program fails on every rank in the same way."""
        doc = self.state.doc
        if doc.incident is None or doc.incident.is_decided or doc.has_ever_stepped:
            return False
        return doc.incident.is_of_code and not self.are_all_alike

    @property
    def are_all_alike(self) -> bool:
        """Whether every rank of the round has failed in the same way."""
        doc, (number, fingerprint, ranks) = self.state.doc, self.memory.alike
        is_this = doc.incident is not None and doc.incident.fingerprint == fingerprint
        return number == doc.round and is_this and len(ranks) >= doc.world_size > 0

    @property
    def is_unexplained(self) -> bool:
        """Whether only consequences are reported so far, and the cause may still be reported."""
        incident = self.state.doc.incident
        if incident is None or incident.is_decided or self.state.is_left:
            return False
        return incident.weight <= CONSEQUENCE

    def leave_order(self) -> LeaveJob:
        """Return the order that ends the job, as sent to all."""
        doc = self.state.doc
        return LeaveJob(
            **self.order_head(doc.stop_order),
            reason=doc.reason,
            exit_code=1 if doc.exit_code is None else doc.exit_code,
            state=doc.phase if doc.phase == "done" else "stopped",
            grace_s=self.state.doc.spec.stop_grace_s,
        )
