"""Asks ranks to save and to stop after an agreed step, and records the outcome."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import floor

from everstep.clock import Clock
from everstep.messages import Fact, OperatorActed, PreemptionNoticed
from everstep_services.agent.core import actions
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.page import BadPageError
from trainer_sdk.page_content import CountedBy

log = logging.getLogger(__name__)

_HASTE = 1.25
"""The next steps may be shorter than the latest by this factor."""
_WRITING_S = 0.1
"""All pages of a node are written within this time."""
_UNKNOWN_STEP_S = 0.5
"""The assumed step time of a rank that has made one step only."""


@dataclass(eq=False, repr=False)
class CoordinatedSaves:
    """Asks scripts that look at `should_stop` through their pages, and others by a signal."""

    _scheduler: str
    _agent: Agent
    _rank: Callable[[int], WatchedRank | None]
    _records: AgentFacts
    _clock: Clock
    _record: Callable[[Fact], None]

    def passed_on(self, act: actions.PassNotice) -> actions.SignalRanks | None:
        """The signal, if the ranks of this node should get it."""
        return (
            None
            if self._counting()
            else actions.SignalRanks(act.number, to_handlers=act.to_handlers)
        )

    def counts_now(self, act: actions.AskRanksToStop) -> actions.SendReport | None:
        """The progress of ranks that count steps only since rendezvous named one; None otherwise.

        A step chosen here would part these ranks from those of other nodes.
        """
        order = self._agent.order
        if act.after_step != 0 or order is None or order.slots == 1 or not self._counting():
            return None
        return self.reached(actions.ReportProgress(order.round))

    def ask_to_stop(self, act: actions.AskRanksToStop) -> bool:
        """Write the step on the pages of ranks that look there; False if none does."""
        ranks = self._counting()
        if not ranks:
            return False
        after_step = act.after_step
        if not after_step:  # nobody has named a step, or nobody counted steps when it was named
            after_step = max(self._reaches(rank) for rank in ranks)
        for rank in ranks:
            rank.page.ask_to_stop(after_step)
        log.info("asked_to_stop ranks=%d after_step=%d", len(ranks), after_step)
        return True

    def ask_to_save(self, act: actions.AskRanksToSave) -> None:
        """Ask ranks to save after a step, and to go on."""
        ranks = self._counting()
        for rank in ranks:
            rank.page.ask_to_save(act.after_step)
        log.info("asked_to_save ranks=%d after_step=%d", len(ranks), act.after_step)

    def reached(self, act: actions.ReportProgress) -> actions.SendReport:
        """The last step of the rank that is ahead, and the length of a short step."""
        paces = [self._pace(rank) for rank in self._counting()]
        if not paces:
            return actions.SendReport(act.round, "reached", "the SDK counts no steps here")
        step = max(pace[0] for pace in paces)
        return actions.SendReport(
            act.round,
            "reached",
            f"its ranks have finished step {step}",
            step=step,
            last_progress_age_s=max(pace[1] for pace in paces if pace[0] == step),
            step_s=min(pace[2] for pace in paces),
        )

    def put_on_record(self, act: actions.RecordAction) -> None:
        """Record a notice of preemption, its outcome, or that a person ends the ranks."""
        order, now, node = self._agent.order, self._clock.now(), self._records.node
        if isinstance(act, actions.RecordNotice):
            noticed = PreemptionNoticed(
                **self._records.of_job(), node=node, reason=act.reason, grace_s=act.grace_s,
                origin="signal" if self._scheduler == "none" else self._scheduler,
                is_whole_job=False,
            )  # fmt: skip
            self._record(noticed)
        elif isinstance(act, actions.RecordInterrupt):
            acted = OperatorActed(
                **self._records.of_job(), by=f"the terminal of {node}", action="interrupt",
                target=node, outcome="accepted", reason=f"{act.name} to its agent", origin="signal",
            )  # fmt: skip
            self._record(acted)
        elif order is not None:
            step = max((self._pace(rank)[0] for rank in self._counting()), default=None)
            self._record(self._records.preemption(order, act, now=now, step=step))

    def has_seen(self, rank: int) -> int | None:
        """The last step of a rank that has seen the request to stop, read from its page."""
        watched = self._rank(rank)
        page = None if watched is None else watched.reading()
        return page.step if page is not None and page.stop_seen_s else None

    def _counting(self) -> list[WatchedRank]:
        """All ranks of this node, if any script of them looks whether it should stop."""
        order = self._agent.order
        if order is None:
            return []
        numbers = range(order.first_rank, order.first_rank + order.ranks)
        ranks = [rank for rank in map(self._rank, numbers) if rank is not None]
        pages = [rank.reading() for rank in ranks]
        look = any(page and page.listens and page.counted_by is CountedBy.SDK for page in pages)
        return ranks if look else []

    def _reaches(self, rank: WatchedRank) -> int:
        step, age_s, step_s = self._pace(rank)
        return step + 1 + floor(_HASTE * (age_s + _WRITING_S) / step_s)

    def _pace(self, rank: WatchedRank) -> tuple[int, float, float]:
        """A rank's last step, the seconds since it was finished, and the length of a short step."""
        page = rank.reading()
        if page is None or not page.steps:
            return 0, 0.0, _UNKNOWN_STEP_S
        try:
            took = sorted(rank.page.step_durations())
        except BadPageError:
            took = []
        step_s = max(took[len(took) // 4], 1e-4) if took else _UNKNOWN_STEP_S
        return page.step, max(0.0, self._clock.now() - page.progress_s), step_s
