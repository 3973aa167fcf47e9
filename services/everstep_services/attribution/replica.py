"""A replica of attribution: connects it to the bus, and names its loops."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.bus.derived_ids import DerivedIds
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.replicas import on_bus
from everstep.runtime import Loop, Parts
from everstep_services.agent.probes.kernel import xid
from everstep_services.attribution.actions import VerdictActions
from everstep_services.attribution.analyzers.runner import AnalyzerRunner, installed
from everstep_services.attribution.answers import AttributionAnswers
from everstep_services.attribution.cases import CaseKeeper
from everstep_services.attribution.domain import weights
from everstep_services.attribution.examiner import Examiner
from everstep_services.attribution.explainer import Explainer
from everstep_services.attribution.incident import Analyzer
from everstep_services.attribution.log_analysis import rules as log_rules
from everstep_services.attribution.service import Attribution
from everstep_services.attribution.settings import AttributionSettings, defaults
from everstep_services.attribution.stack_analysis import rules as stack_rules


class AttributionReplica:
    """One replica, put together."""

    def __init__(
        self,
        settings: AttributionSettings,
        analyzers: Mapping[str, Analyzer],
        bus: Bus,
        clock: Clock,
    ) -> None:
        self.keeper = CaseKeeper(bus, clock, settings.keep_days)
        examiner = Examiner(bus, AnalyzerRunner(analyzers))
        explainer = Explainer(settings.explainer)
        self.ids = DerivedIds(bus, clock)
        self.actions = VerdictActions(defaults(settings), self.keeper, bus, clock, self.ids)
        self.attribution = Attribution(
            settings, bus, clock, self.keeper, examiner, explainer, self.actions
        )
        self.answers = AttributionAnswers(bus, self.attribution)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops to run."""
        return (
            self.ids.keep_for_ever,
            self.attribution.work_for_ever,
            self.attribution.explain_for_ever,
            self.actions.act_for_ever,
            self.answers.answer_for_ever,
        )

    def statistics(self) -> dict[str, float]:
        """Return gauges and counts so far, for metrics."""
        return {**self.attribution.statistics(), **self.actions.statistics()}


def read_rules() -> None:
    """Read what analyzers go by, before the loop runs, and before an upgrade changes the files."""
    for read in (log_rules.shipped, stack_rules.shipped, weights.shipped, xid.table):
        read()


def opened(
    settings: AttributionSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AbstractAsyncContextManager[Parts]:
    """Open a replica, whether the bus is there or not: verdicts come once it is there.

    Facts wait in `spool`, or below the `spool_dir` of the bus.
    """
    read_rules()
    make = partial(AttributionReplica, settings, installed())
    return on_bus("attribution", bus_settings, make, spool)
