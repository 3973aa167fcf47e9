"""The health service, put together for the process that runs it."""

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.replicas import opening
from everstep.runtime import Loop
from everstep_services.health.answers import HealthAnswers
from everstep_services.health.learned_limits import LearnedLimits
from everstep_services.health.nodes.actions import OperatorActions
from everstep_services.health.nodes.service import NodeService
from everstep_services.health.observer import HealthObserver
from everstep_services.health.settings import HealthSettings


class HealthReplica:
    """One replica of health: its parts, and the loops to run."""

    def __init__(self, settings: HealthSettings, bus: Bus, clock: Clock) -> None:
        self.records = Recorder(bus, clock)
        self.limits = LearnedLimits(settings.limits, bus, clock, self.records)
        self.ids = DerivedIds(bus, clock)
        self.observer = HealthObserver(settings, bus, clock, self.records, self.limits, self.ids)
        self.nodes = NodeService(settings.nodes, bus, clock, self.records, self.observer.nodes)
        self.answers = HealthAnswers(
            bus,
            clock,
            self.records,
            actions=OperatorActions(settings.nodes, bus, clock, self.records, self.nodes),
            observer=self.observer,
            limits=self.limits,
            nodes=self.nodes,
        )

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What the process runs until it ends."""
        observer, limits = self.observer, self.limits
        return (
            self.ids.keep_for_ever,
            observer.hear_for_ever,
            observer.read_lag.hear_for_ever,
            observer.write_proof.write_for_ever,
            observer.follow_jobs_for_ever,
            observer.follow_stalls_for_ever,
            observer.follow_recoveries_for_ever,
            observer.judge_for_ever,
            observer.remind_for_ever,
            limits.follow_starts_for_ever,
            limits.write_for_ever,
            self.nodes.keep_for_ever,
            self.answers.answer_for_ever,
            self.records.record_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        return {
            **self.observer.statistics(),
            **self.limits.statistics(),
            **self.nodes.statistics(),
            "findings_waiting": float(self.records.waiting),
        }


opened = opening("health", HealthReplica)
"""A replica, whether or not the bus is there: while it is away, no node is lost."""
