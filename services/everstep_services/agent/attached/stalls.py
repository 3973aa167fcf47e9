"""Stalls of ranks that another launcher has started: they are recorded, and end nothing."""

import logging
from collections.abc import Callable

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Fact, RankRecovered, RankStalled
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.limits_table import LineWriter
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.recorder import StallFacts, stall_sentence
from everstep_services.agent.telemetry.facts import AgentFacts

log = logging.getLogger(__name__)


class AttachedStalls(StallFacts):
    """Records the findings of the monitor."""

    noted = frozenset({"armed", "learning"})

    def __init__(  # noqa: PLR0913  each is a port or what was asked for
        self,
        plan: AttachedPlan,
        bus: Bus,
        clock: Clock,
        records: AgentFacts,
        ranks: RankSource,
        record: Callable[[Fact], None],
        say: LineWriter,
        changed: Callable[[RankStalled | None, str], None],
    ) -> None:
        """`changed` hears of each stall in words, and of None when no rank is stalled any more."""
        super().__init__(plan, bus, clock, records, ranks, record, say, plan.others, is_fatal=False)
        self._changed = changed

    def _found(self, fact: RankStalled, stalled: Stalled, process: ProcessState) -> None:
        reason = stall_sentence(stalled, process)
        self._changed(fact, reason)
        log.warning("rank_stalled %s", reason)

    def _recovered(self, fact: RankRecovered, moving: Moving) -> None:
        log.info("rank_moves rank=%d stalled_s=%.1f", fact.rank, moving.stalled_s)
        if not self._facts:
            self._changed(None, "")

    def _warn(self, text: str) -> None:
        log.warning(text)
