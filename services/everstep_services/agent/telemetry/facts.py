"""The facts that an agent records about its ranks and its node."""

from functools import cache
from pathlib import Path

from everstep.clock import Clock
from everstep.ids import new_id
from everstep.incident_causes import IN_PROCESS
from everstep.messages import (
    BlobRef,
    FaultInjected,
    IncidentClosed,
    IncidentOpened,
    Ledger,
    PreemptionAcknowledged,
    PreemptionMissed,
    PreemptionSaved,
    ProgressMade,
    RankExited,
    RankStarted,
    StartRanks,
    StateHealed,
    WatchChanged,
)
from everstep.messages.base import shared
from everstep.messages.facts.stamp import (
    FactHead,
    FactStamp,
    JobFactHead,
    RankFactHead,
    RoundFactHead,
)
from everstep_services.agent.core import actions
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.ranks.protocol import RankRuns
from everstep_services.agent.stalls.judge import WatchState
from everstep_services.agent.telemetry.step_figures import NO_FIGURES, StepFigures, StepsMade
from trainer_sdk.wire import Injected, RankHealed, Restarted

_FIRST_NAMESPACE = 0xEFFFFFFC
"""The kernel's number of the namespace of processes that it starts with."""


@cache
def _is_in_hosts_namespace() -> bool:
    """Whether the kernel's log has the same ids for our processes as we have."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return False


class AgentFacts:
    """Makes facts in the name of one agent."""

    def __init__(self, job: str, node: str, clock: Clock) -> None:
        self._job = job
        self.node = node
        self._clock = clock

    def rank_started(
        self, order: StartRanks, event: RankRuns, *, log: Path, cpus: str
    ) -> RankStarted:
        started = shared(RankStarted, event)
        return RankStarted(
            **{**started, **self.of_rank(order, event.rank)}, log=str(log), cpus=cpus
        )

    def healed(self, order: StartRanks, healed: RankHealed) -> StateHealed:
        own = shared(StateHealed, healed)
        return StateHealed(**{**own, **self.of_rank(order, healed.rank)})

    def injected(self, order: StartRanks, rank: int, injected: Injected) -> FaultInjected:
        """A fault that the script makes in this rank."""
        return FaultInjected(
            **self.of_round(order.round), fault=injected.fault, by="the script", node=self.node,
            rank=rank, target=injected.target, lasts_s=injected.lasts_s,
        )  # fmt: skip

    def rank_exited(  # noqa: PLR0913  what is known of an end
        self,
        fact_id: str,
        order: StartRanks,
        rank: int,
        pid: int,
        ending: RankExit,
        *,
        step: int | None,
        first_error: str = "",
        log: BlobRef | None = None,
        incident: str | None = None,
    ) -> RankExited:
        return RankExited(
            **self.of_rank(order, rank, fact_id),
            pid=pid,
            how=ending.how,
            lasted_s=ending.lasted_s,
            exit_code=ending.code,
            signal=ending.signal,
            error=ending.error,
            first_error=first_error,
            log=log,
            core_dumped=ending.core_dumped,
            step=step,
            incident=incident,
            is_pid_of_host=_is_in_hosts_namespace(),
        )

    def progress_made(
        self,
        round: int,
        made: StepsMade,
        *,
        is_counted_anew: bool = False,
        lost_steps: int = 0,
        figures: StepFigures = NO_FIGURES,
    ) -> ProgressMade:
        return ProgressMade(
            **self.of_round(round),
            **shared(ProgressMade, made),
            node=self.node,
            step_p50_s=figures.p50_s,
            step_p99_s=figures.p99_s,
            step_max_s=figures.max_s,
            values=figures.values,
            total_steps=figures.total,
            is_counted_anew=is_counted_anew,
            lost_steps=lost_steps,
        )

    def watch_changed(
        self, round: int | None, state: WatchState, reason: str, *,
        until_s: float | None = None, sections: tuple[str, ...] = (),
    ) -> WatchChanged:  # fmt: skip
        return WatchChanged(
            **self.of_job(round),
            node=self.node,
            state=state,
            reason=reason,
            until_s=until_s,
            sections=sections,
        )

    def preemption(
        self,
        order: StartRanks,
        act: actions.RecordStopSeen | actions.RecordSaved | actions.RecordMissed,
        *,
        now: float,
        step: int | None,
    ) -> PreemptionAcknowledged | PreemptionSaved | PreemptionMissed:
        """The outcome of a preemption; `step` is the last finished step, where that is known."""
        of = self.of_round(order.round)
        match act:
            case actions.RecordStopSeen():
                waited_s = round(act.waited_s, 3)
                return PreemptionAcknowledged(
                    **of, node=self.node, step=act.step, waited_s=waited_s
                )
            case actions.RecordSaved():
                left_s = round(max(act.until - now, 0.0), 3)
                return PreemptionSaved(**of, step=act.step, tier="script", left_s=left_s)
            case actions.RecordMissed():
                return PreemptionMissed(**of, node=self.node, reason=act.reason, step=step)

    def restarted(
        self, order: StartRanks, rank: int, restarted: Restarted, step: int | None = None
    ) -> tuple[IncidentOpened, IncidentClosed]:
        """The incident of a restart in the ranks' processes, which is over when it is heard of."""
        cause, incident = f"rank {rank} {restarted.reason}", new_id()
        reason = f"{cause}; all ranks restarted in their processes"
        opened = IncidentOpened(
            **self.of_round(order.round), incident=incident, trigger=IN_PROCESS, reason=cause,
            node=self.node, rank=rank, step=step, error_name=restarted.error_name,
        )  # fmt: skip
        ledger = Ledger(detect_s=restarted.waited_s, other_s=restarted.took_s)
        closed = IncidentClosed(
            **self.of_round(order.round), incident=incident, outcome="recovered", reason=reason,
            ledger=ledger, next_round=order.round,
        )  # fmt: skip
        return opened, closed

    def of_rank(self, order: StartRanks, rank: int, fact_id: str | None = None) -> RankFactHead:
        """The head of a fact about a rank of this node."""
        head = self._head()
        if fact_id is not None:
            head["id"] = fact_id
        return {
            **head,
            "round": order.round,
            "node": self.node,
            "slot": order.slot,
            "rank": rank,
            "local_rank": rank - order.first_rank,
        }

    def of_round(self, round: int) -> RoundFactHead:
        """The head of a fact about a round."""
        return {**self._head(), "round": round}

    def of_job(self, round: int | None = None) -> JobFactHead:
        """The head of a fact about the job, which may be in a round."""
        return {**self._head(), "round": round}

    def _head(self) -> FactHead:
        return FactStamp(self._clock.wall(), new_id, f"agent/{self.node}").head(self._job)
