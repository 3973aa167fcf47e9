"""The facts about a job that another launcher runs.

Each agent records the nodes and incidents that it sees. The agent of slot 0 also records the job,
its allocation and its rounds, which rendezvous would record otherwise.
"""

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
    RoundEnded,
    RoundFormed,
    RoundStarted,
    StartRanks,
)
from everstep.messages.base import earlier, shared
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.attached.attendance import (
    IncidentCloses,
    IncidentOpens,
    JobOver,
    RoundEnds,
)
from everstep_services.agent.telemetry.facts import AgentFacts


class AttachedFacts(AgentFacts):
    """Makes facts in the name of one agent, and of the rendezvous that there is not."""

    def __init__(self, plan: AttachedPlan, clock: Clock) -> None:
        super().__init__(plan.job, plan.node, clock)
        self._plan = plan

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
            **self.of_job(),
            node=plan.node,
            allocation=plan.allocation,
            ranks=plan.place.local_size,
            address=plan.address,
            version=__version__,
        )
        if not plan.tells_of_job:
            return [joined]
        started = JobStarted(
            **self.of_job(),
            spec=plan.spec,
            world_size=plan.place.world_size,
            allocation=plan.allocation,
            user=plan.user,
            version=__version__,
        )
        allocation = AllocationStarted(
            **self.of_job(),
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
            **self.of_round(number),
            members=(member,),
            world_size=place.world_size,
            waited_s=0.0,
            allocation=plan.allocation,
            cause="start" if number == 1 else "restart",
            reason=f"formed by {place.launcher}; of its nodes only slot 0 is named",
            restarts=number - 1,
        )
        started = RoundStarted(
            **self.of_round(number), start_s=0.0, master_address=address, master_port=port
        )
        return [formed, started]

    def round_ends(self, ends: RoundEnds, incident: str | None, step: int | None) -> list[Fact]:
        """No rank of the round is left on this node."""
        if not self._plan.tells_of_job:
            return []
        ended = RoundEnded(
            **self.of_round(ends.round),
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
            **self.of_round(number),
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
            **self.of_round(number), incident=incident, **shared(IncidentClosed, closes)
        )

    def ends(self, over: JobOver, rounds: int, step: int | None) -> list[Fact]:
        """The job is over."""
        plan = self._plan
        cause = "done" if over.state == "done" else "failed"
        left = NodeLeft(
            **self.of_job(), node=plan.node, cause=cause, reason=over.reason, slot=plan.place.slot
        )
        if not plan.tells_of_job:
            return [left]
        ended = JobEnded(
            **self.of_job(),
            state=over.state,
            exit_code=over.exit_code,
            reason=over.reason,
            last_step=step,
            rounds=rounds,
        )
        allocation = AllocationEnded(
            **self.of_job(),
            allocation=plan.allocation,
            state="lost" if over.state == "unknown" else over.state,
            reason=over.reason,
            exit_code=over.exit_code,
        )
        return [left, ended, allocation]
