"""The facts about a job that another launcher runs.

Each agent records the nodes and incidents that it sees. The agent of slot 0 also records the job,
its allocation and its rounds, which rendezvous would record otherwise.
"""

from dataclasses import dataclass

from everstep import __version__
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import (
    AllocationEnded,
    AllocationStarted,
    Fact,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Member,
    NodeJoined,
    NodeLeft,
    ProgressMade,
    RoundEnded,
    RoundFormed,
    RoundStarted,
    StartRanks,
)
from everstep.messages.base import earlier
from everstep.messages.facts.stamp import FactHead, FactStamp, JobFactHead, RoundFactHead
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.attached.attendance import (
    IncidentCloses,
    IncidentOpens,
    JobOver,
    RoundEnds,
)

_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class StepsMade:
    """Steps that were made since the last record."""

    step: int
    is_first: bool
    steps: int
    steps_s: float


class StepCounter:
    """Counts the steps of one round at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = clock.now()
        self._said_step = 0

    def begins(self) -> None:
        """A round begins."""
        self._said_at = self._clock.now()
        self._said_step = 0

    def first(self, step: int) -> StepsMade | None:
        """A rank has made its first step of the round."""
        if self._said_step:
            return None
        return self._made(step, is_first=True, steps=1)

    def since(self, step: int | None, *, is_last: bool = False) -> StepsMade | None:
        """The steps to record by now; at the end of a round, all that were not recorded yet."""
        is_due = is_last or self._clock.now() - self._said_at >= _EVERY_S
        if not is_due or step is None or not 0 < self._said_step < step:
            return None
        return self._made(step, is_first=False, steps=step - self._said_step)

    def _made(self, step: int, *, is_first: bool, steps: int) -> StepsMade:
        now = self._clock.now()
        took_s, self._said_at, self._said_step = now - self._said_at, now, step
        return StepsMade(step, is_first, steps, took_s)


class AttachedFacts:
    """Makes facts in the name of one agent."""

    def __init__(self, plan: AttachedPlan, clock: Clock) -> None:
        self._plan = plan
        self._clock = clock

    def order(self, number: int, rank: int, local_rank: int) -> StartRanks:
        """The order that rendezvous would have given, as far as it concerns this rank."""
        place, (address, port) = self._plan.place, self._plan.master
        local_size = max(place.local_size, 1)
        return StartRanks(
            id=new_id(),
            job=self._plan.job,
            round=number,
            reason=f"started by {place.launcher}",
            slot=place.slot,
            slots=self._plan.spec.nodes_max,
            first_rank=rank - local_rank,
            ranks=local_size,
            world_size=place.world_size,
            master_address=address,
            master_port=port,
            restarts=number - 1,
        )

    def begins(self) -> list[Fact]:
        """The first rank is here."""
        plan = self._plan
        joined = NodeJoined(
            **self._of_job(),
            node=plan.node,
            allocation=plan.allocation,
            ranks=plan.place.local_size,
            address=plan.address,
            version=__version__,
        )
        if not plan.tells_of_job:
            return [joined]
        started = JobStarted(
            **self._of_job(),
            spec=plan.spec,
            world_size=plan.place.world_size,
            allocation=plan.allocation,
            user=plan.user,
            version=__version__,
        )
        allocation = AllocationStarted(
            **self._of_job(),
            allocation=plan.allocation,
            scheduler=plan.scheduler.name,
            scheduler_job=plan.scheduler.job,
            attempt=plan.scheduler.attempt,
            config_fingerprint=plan.spec.config_fingerprint,
        )
        return [started, allocation, joined]

    def round_begins(self, number: int) -> list[Fact]:
        """The first rank of a round is here. Only their own agents know the other ranks."""
        plan = self._plan
        if not plan.tells_of_job:
            return []
        place, (address, port) = plan.place, plan.master
        member = Member(slot=0, node=plan.node, first_rank=0, ranks=place.local_size)
        formed = RoundFormed(
            **self._of_round(number),
            members=(member,),
            world_size=place.world_size,
            waited_s=0.0,
            allocation=plan.allocation,
            cause="start" if number == 1 else "restart",
            reason=f"formed by {place.launcher}; of its nodes only slot 0 is named",
            restarts=number - 1,
        )
        started = RoundStarted(
            **self._of_round(number), start_s=0.0, master_address=address, master_port=port
        )
        return [formed, started]

    def round_ends(self, ends: RoundEnds, incident: str | None, step: int | None) -> list[Fact]:
        """No rank of the round is left on this node."""
        if not self._plan.tells_of_job:
            return []
        ended = RoundEnded(
            **self._of_round(ends.round),
            cause=ends.cause,
            reason=ends.reason,
            lasted_s=round(ends.lasted_s, 3),
            last_step=step,
            node=None if ends.rank is None else self._plan.node,
            rank=ends.rank,
            incident=incident,
            trigger=ends.fact,
        )
        return [ended]

    def opens(self, number: int, incident: str, opens: IncidentOpens, step: int | None) -> Fact:
        """A rank has failed by itself."""
        now, waited_s = self._clock.wall(), opens.waited_s
        return IncidentOpened(
            **self._of_round(number),
            incident=incident,
            trigger=opens.trigger,
            reason=opens.reason,
            trigger_fact=opens.fact,
            node=self._plan.node,
            rank=opens.rank,
            step=step,
            last_progress_at=None if waited_s is None else earlier(now, waited_s),
        )

    def closes(self, number: int, incident: str, closes: IncidentCloses) -> Fact:
        """The training steps again, or will not."""
        return IncidentClosed(
            **self._of_round(number),
            incident=incident,
            outcome=closes.outcome,
            reason=closes.reason,
            ledger=closes.ledger,
            next_round=closes.next_round,
            lost_steps=closes.lost_steps,
        )

    def progress(self, number: int, made: StepsMade) -> ProgressMade:
        """The progress of the training, from slot 0."""
        return ProgressMade(
            **self._of_round(number),
            step=made.step,
            node=self._plan.node,
            is_first=made.is_first,
            steps=made.steps,
            steps_s=round(made.steps_s, 6),
        )

    def ends(self, over: JobOver, rounds: int, step: int | None) -> list[Fact]:
        """The job is over."""
        plan = self._plan
        cause = "done" if over.state == "done" else "failed"
        left = NodeLeft(
            **self._of_job(), node=plan.node, cause=cause, reason=over.reason, slot=plan.place.slot
        )
        if not plan.tells_of_job:
            return [left]
        ended = JobEnded(
            **self._of_job(),
            state=over.state,
            exit_code=over.exit_code,
            reason=over.reason,
            last_step=step,
            rounds=rounds,
        )
        allocation = AllocationEnded(
            **self._of_job(),
            allocation=plan.allocation,
            state="lost" if over.state == "unknown" else over.state,
            reason=over.reason,
            exit_code=over.exit_code,
        )
        return [left, ended, allocation]

    def _of_round(self, number: int) -> RoundFactHead:
        return {**self._head(), "round": number}

    def _of_job(self) -> JobFactHead:
        return {**self._head(), "round": None}

    def _head(self) -> FactHead:
        stamp = FactStamp(self._clock.wall(), new_id, f"agent/{self._plan.node}")
        return stamp.head(self._plan.job)
