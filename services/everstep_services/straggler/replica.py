"""A replica of straggler: connects it to the bus, and names its loops."""

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.replicas import opening
from everstep.runtime import Loop
from everstep_services.straggler.actions import StragglerActions
from everstep_services.straggler.answers import StragglerAnswers
from everstep_services.straggler.documents import JobDocuments
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.jobs import Jobs, MakeJudge
from everstep_services.straggler.judgements import JudgementRunner
from everstep_services.straggler.service import Observer
from everstep_services.straggler.settings import StragglerSettings


class Straggler:
    """One replica, put together."""

    def __init__(
        self, settings: StragglerSettings, bus: Bus, clock: Clock, make_judge: MakeJudge = JobJudge
    ) -> None:
        judgements = JudgementRunner(clock)
        self.jobs = Jobs(settings, make_judge)
        self.ids = DerivedIds(bus, clock)
        self.documents = JobDocuments(settings, bus, clock, self.jobs, self.ids)
        self.actions = StragglerActions(settings, bus, clock, self.documents, self.ids)
        self.observer = Observer(
            settings, bus, clock, self.jobs,
            documents=self.documents, actions=self.actions, judgements=judgements,
            ids=self.ids,
        )  # fmt: skip
        self.answers = StragglerAnswers(bus, clock, self.jobs, judgements)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops to run."""
        return (
            self.ids.keep_for_ever,
            self.observer.hear_for_ever,
            self.observer.follow_jobs_for_ever,
            self.observer.follow_allocations_for_ever,
            self.observer.follow_rounds_for_ever,
            self.observer.follow_faults_for_ever,
            self.observer.judge_for_ever,
            self.observer.write_for_ever,
            self.observer.report_for_ever,
            self.documents.follow_for_ever,
            self.documents.follow_switches_for_ever,
            self.answers.answer_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """Return gauges and counts so far, for metrics."""
        return {
            **self.observer.statistics(),
            **self.documents.statistics(),
            **self.actions.statistics(),
        }


opened = opening("straggler", Straggler)
"""Open a replica, whether the bus is there or not: windows are missing while it is away."""
