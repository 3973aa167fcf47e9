"""Stalls of ranks that another launcher has started: they are recorded, and end nothing."""

import logging
from collections.abc import Callable, Collection

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Fact, RankStalled, StartRanks
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.ranks.protocol import RankSaid
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.limits_table import LimitNotices, LineWriter
from everstep_services.agent.stalls.monitor import MonitoredRanks, StallMonitor
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.recorder import (
    hung,
    limits_in,
    pause_fact,
    stall_sentence,
)
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.wire import Hung, Restarted

log = logging.getLogger(__name__)


class AttachedStalls:
    """Records the findings of the monitor."""

    def __init__(  # noqa: PLR0913  each is a port or what is known of ranks
        self,
        plan: AttachedPlan,
        bus: Bus,
        clock: Clock,
        records: AgentFacts,
        live: Callable[[], Collection[int]],
        order: Callable[[int], StartRanks],
        rank: Callable[[int], WatchedRank | None],
        record: Callable[[Fact], None],
        say: LineWriter,
        changed: Callable[[RankStalled | None, str], None],
    ) -> None:
        self._plan = plan
        self._bus = bus
        self._clock = clock
        self._records = records
        self._order = order
        self._rank = rank
        self._record = record
        self._changed = changed
        """Is called with each stall in words, and with None when no rank is stalled any more."""
        self._round = 0
        self._facts: dict[int, RankStalled] = {}
        self._state = ""
        watched = MonitoredRanks(live, rank, self._stalled, self._moving, log.warning)
        self.watch = StallMonitor(plan.limits, clock, watched)
        self._announcer = LimitNotices(self.watch.limits, plan.others, say)

    async def follow_limits_for_ever(self) -> None:
        """Use the limits that health learns about this job."""
        fingerprint = self._plan.spec.config_fingerprint
        async with self._bus.documents("LIMITS").follow(self._plan.job) as documents:
            async for document in documents:
                self.watch.learned(limits_in(document.data, fingerprint))
                self._announcer.compare()
                self.note_state("health has published limits")

    def begins(self, order: StartRanks) -> None:
        """A round begins."""
        self._round = order.round
        self._facts.clear()
        self.watch.begins(order)
        self._announcer.show(is_for_job=self._plan.tells_of_job)
        self.note_state(f"ranks were started by {self._plan.place.launcher}")

    def stepped(self, rank: int) -> None:
        """A rank has made its first step: the timeout of its process group may be compared."""
        watched = self._rank(rank)
        page = None if watched is None else watched.reading()
        if page is not None:
            self._announcer.group_waits(page.group_timeout_s)

    def said(self, event: RankSaid) -> None:
        """A rank asks for a pause of the judgement, or its end; or its wrapper restarted it."""
        if isinstance(event.message, Hung):
            self._stalled(*hung(event.rank, event.message, self._rank(event.rank), self._clock))
            return
        if isinstance(event.message, Restarted):
            order = self._order(event.rank)
            for told in self._records.restarted(order, event.rank, event.message):
                self._record(told)
            return
        fact = pause_fact(self._records, event, self.watch.state)
        if fact is not None:
            self._record(fact)
        else:
            log.info("not_done rank=%d said=%s", event.rank, event.message)

    def note_state(self, why: str) -> None:
        """Record whether stalls are looked for."""
        state = self.watch.state
        if state in {"armed", "learning"} and state != self._state:
            self._state = state
            named = tuple(sorted(self.watch.limits.named()))
            self._record(self._records.watch_changed(self._round, state, why, sections=named))

    def _stalled(self, stalled: Stalled, process: ProcessState) -> None:
        place = stalled.place
        order = self._order(place.rank)
        fact = self._records.rank_stalled(order, stalled, process, is_fatal=False)
        self._facts[place.rank] = fact
        self._record(fact)
        reason = stall_sentence(stalled, process)
        self._changed(fact, reason)
        log.warning("rank_stalled %s", reason)

    def _moving(self, moving: Moving) -> None:
        rank = moving.stalled.place.rank
        fact = self._facts.pop(rank, None)
        if fact is not None:
            self._record(self._records.rank_recovered(self._order(rank), moving, fact.id))
            log.info("rank_moves rank=%d stalled_s=%.1f", rank, moving.stalled_s)
            if not self._facts:
                self._changed(None, "")
