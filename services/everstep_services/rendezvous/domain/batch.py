"""One batch of events being decided: what it reads, and where its decisions gather."""

from dataclasses import dataclass, field
from typing import assert_never

from everstep.incident_causes import CONSEQUENCE, meaning_of
from everstep.messages import AwaitRound, Fact, LeaveJob, Order, Seat, StandBy, StopRanks
from everstep.messages.codec import encode
from everstep.messages.facts.stamp import FactHead, FactStamp
from everstep_services.rendezvous.domain.events import JobControl, LivenessProbe, Now, Send
from everstep_services.rendezvous.domain.state import OVER, JobState, Phase
from everstep_services.rendezvous.domain.timers import StartTimes, Timers
from everstep_services.rendezvous.settings import RendezvousSettings


class RoundFactHead(FactHead):
    """The head of a fact about a round."""

    round: int


class JobFactHead(FactHead):
    """The head of a fact about a job, which may be in a round."""

    round: int | None


class ReplicaMemory:
    """What one replica has seen with its own clock. Lost with it: its successor starts anew."""

    def __init__(self) -> None:
        self.started: StartTimes = {}
        """When each timer was started."""
        self.heard: dict[str, float] = {}
        """When each agent, by instance, was heard last."""
        self.answered: dict[str, float] = {}
        """When each agent, by instance, last gave a sign of life to a probe."""
        self.probed: dict[str, float] = {}
        """When each agent, by instance, was last asked for one."""
        self.alike: tuple[int, str, set[int]] = (0, "", set())
        """A round, the fingerprint of its failure, and the ranks that failed in that way."""
        self.slowest = ""
        """The node whose ranks came up last."""

    def failed_alike(self, round: int, fingerprint: str, rank: int) -> None:
        """One more rank has failed, perhaps in the same way as the others of its round."""
        if self.alike[:2] != (round, fingerprint):
            self.alike = (round, fingerprint, set())
        self.alike[2].add(rank)


@dataclass(slots=True)
class Batch:
    """Decisions change the state and leave here what others must be told."""

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

    def _stamp(self) -> FactStamp:
        return FactStamp(self.now.wall, self.now.new_id, "rendezvous")

    def record(self, fact: Fact) -> str:
        """Put a fact on record once the document that holds it is written; its id."""
        self.state.outbox.append(encode(fact).decode())
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
        """Something becomes due then."""
        self.wakes.append(self.now.s + max(seconds, 0.0))

    def forget_agent(self, instance: str) -> None:
        """It will not be heard again."""
        memory = self.memory
        for times in (memory.heard, memory.answered, memory.probed):
            times.pop(instance, None)
        self.timers.clear("rival", instance)

    @property
    def phase_s(self) -> float:
        """How long the phase has lasted."""
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
        """What this agent was told last."""
        doc, state = self.state.doc, self.state
        if doc.phase in OVER:
            return self.leave_order()
        if seat.stage in {"starting", "running", "finished"}:
            return state.start_order(seat)
        if seat.stage == "stopping":
            return self.stop_order()
        return StandBy(
            id=doc.start_order or doc.stop_order or "0" * 32,
            job=doc.job,
            round=doc.round,
            reason=doc.reason,
        )

    def say_waiting(self, what: str, reason: str) -> None:
        """Tell all agents why no round forms now; `what` stays the same until there is news."""
        self.state.set(waiting=what, reason=reason)
        order = self.await_order()
        assert order is not None
        self.send(order)

    def await_order(self) -> AwaitRound | None:
        """Why no round forms, once that was said to all."""
        doc = self.state.doc
        if not doc.waiting:
            return None
        said = doc.stop_order or "0" * 32
        return AwaitRound(id=said, job=doc.job, round=doc.round, reason=doc.reason)

    def stop_order(self) -> StopRanks:
        """The end of this round, as it was told to all."""
        doc = self.state.doc
        cause = doc.incident.trigger if doc.incident else "operator"
        return StopRanks(
            id=doc.stop_order or "0" * 32,
            job=doc.job,
            round=doc.round,
            reason=doc.incident.reason if doc.incident else doc.reason,
            cause=cause,
            incident=doc.incident.id if doc.incident else None,
            evidence_s=self.evidence_s(cause),
            grace_s=self.state.doc.spec.stop_grace_s,
            cause_within_s=self._ranks_end_within_s,
        )

    @property
    def _ranks_end_within_s(self) -> float:
        """How long ranks may end by themselves, for what that tells."""
        if self.is_compared:
            return self.settings.alike_within_s
        return self.settings.cause_within_s if self.is_unexplained else 0.0

    @property
    def is_compared(self) -> bool:
        """The program seems to be wrong; if so, every rank fails in the same way."""
        doc = self.state.doc
        if doc.incident is None or doc.incident.is_decided or doc.has_ever_stepped:
            return False
        return doc.incident.is_of_code and not self.are_all_alike

    @property
    def are_all_alike(self) -> bool:
        """Every rank of the round has failed, and in the same way."""
        doc, (number, fingerprint, ranks) = self.state.doc, self.memory.alike
        is_this = doc.incident is not None and doc.incident.fingerprint == fingerprint
        return number == doc.round and is_this and len(ranks) >= doc.world_size > 0

    @property
    def is_unexplained(self) -> bool:
        """Only consequences of what has happened are known, and there may be more to hear."""
        incident = self.state.doc.incident
        if incident is None or incident.is_decided or self.state.is_left:
            return False
        return incident.weight <= CONSEQUENCE

    def leave_order(self) -> LeaveJob:
        """The end of the job, as it is told to all."""
        doc = self.state.doc
        return LeaveJob(
            id=doc.stop_order or "0" * 32,
            job=doc.job,
            round=doc.round,
            reason=doc.reason,
            exit_code=1 if doc.exit_code is None else doc.exit_code,
            state=doc.phase if doc.phase == "done" else "stopped",
            grace_s=self.state.doc.spec.stop_grace_s,
        )
