"""Stalls of ranks that another launcher has started: they are recorded, and end nothing."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from everstep.messages import RankRecovered, RankStalled
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.recorder import StallFacts, stall_sentence

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AttachedStalls(StallFacts):
    """Records the findings of the monitor."""

    noted = frozenset({"armed", "learning"})

    _changed: Callable[[RankStalled | None, str], None]
    """Hears of each stall in words, and of None when no rank is stalled any more."""

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
