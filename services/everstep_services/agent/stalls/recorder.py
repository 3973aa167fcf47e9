"""The consequences of stalls: facts, reports to rendezvous, lines for people, learned limits."""

import logging
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.incident_causes import BY_MONITOR
from everstep.messages import (
    BadMessageError,
    Fact,
    LimitsDocument,
    NameExcuse,
    RankStalled,
    StartRanks,
    decode_as,
)
from everstep_services.agent.core import actions
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.protocol import RankSaid
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.stalls.collectives import entered_of
from everstep_services.agent.stalls.judge import Moving, Stalled, WatchState
from everstep_services.agent.stalls.limits import BY_HAND, Limit
from everstep_services.agent.stalls.limits_table import ExternalLimits, LimitNotices, time_text
from everstep_services.agent.stalls.monitor import MonitoredRanks, StallMonitor
from everstep_services.agent.stalls.position import RankPosition
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.wire import Hung, Paused, Resumed

log = logging.getLogger(__name__)


def limits_in(data: bytes | None, config_fingerprint: str) -> LimitsDocument | None:
    """The limits learned for this configuration, and those set by hand; None if there are none."""
    if data is None:
        return None
    try:
        learned = decode_as(data, LimitsDocument)
    except BadMessageError as error:
        log.warning("limits_unreadable error=%s", error)
        return None
    if learned.config_fingerprint in {"", config_fingerprint}:
        return learned
    by_hand = tuple(limit for limit in learned.limits if limit.source == BY_HAND)
    return replace(learned, limits=by_hand, first_step_longest_s=None) if by_hand else None


def pause_fact(records: AgentFacts, event: RankSaid, state: WatchState) -> Fact | None:
    """The fact about a pause of the judgement, or about its end; None for another message."""
    match event.message:
        case Paused(reason=reason, for_s=for_s):
            why = f"rank {event.rank} has paused it" + (f": {reason}" if reason else "")
            return records.watch_changed(event.round, "paused", why, until_s=for_s)
        case Resumed(step=step):
            why = f"rank {event.rank} goes on after step {step}"
            return records.watch_changed(event.round, state, why)
        case _:
            return None


def hung(
    rank: int, message: Hung, watched: WatchedRank | None, clock: Clock
) -> tuple[Stalled, ProcessState]:
    """The stall of a rank that its own monitor ends; its process may be gone already."""
    page = None if watched is None else watched.reading()
    place = RankPosition(
        rank, "heartbeat", clock.now() - message.limit_s,
        Limit(message.limit_s, BY_HAND, "hard_timeout", "inprocess.Wrapper, which ends it"),
        step=None if page is None else page.step, signal=BY_MONITOR,
        pid=None if watched is None else watched.pid,
    )  # fmt: skip
    return Stalled(place, message.limit_s), ProcessState("", "")


def stall_sentence(stalled: Stalled, process: ProcessState) -> str:
    """A stall for people: the rank, its position, the limit, and the state of its process."""
    place = stalled.place
    reason = (
        f"rank {place.rank} has made no progress for {time_text(stalled.waited_s)} "
        f"{_where(place)} ({_limit_text(place)})"
    )
    return f"{reason}; {process.text}" if process.text else reason


class StallRecorder:
    """Records and reports the findings of the monitor."""

    def __init__(  # noqa: PLR0913  each is a port or what was asked for
        self,
        plan: RunPlan,
        bus: Bus,
        agent: Agent,
        rank: Callable[[int], WatchedRank | None],
        records: AgentFacts,
        workdir: Workdir,
        clock: Clock,
        others: ExternalLimits,
        record: Callable[[Fact], None],
        do: Callable[[Sequence[actions.Action]], None],
    ) -> None:
        self._plan = plan
        self._bus = bus
        self._agent = agent
        self._rank = rank
        self._records = records
        self._workdir = workdir
        self._clock = clock
        self._record = record
        self._do = do
        self._facts: dict[int, RankStalled] = {}
        self._state = ""
        watched = MonitoredRanks(self._live, rank, self._stalled, self._moving, self._warn)
        self.watch = StallMonitor(plan.limits, clock, watched)
        self._announcer = LimitNotices(self.watch.limits, others, workdir.say)

    @property
    def suspect(self) -> int | None:
        """The first rank of this round and node that has stalled and is not known to wait."""
        return next(
            (rank for rank, fact in self._facts.items() if not fact.is_waiting_for_ranks), None
        )

    async def follow_limits_for_ever(self) -> None:
        """Use the limits that health learns about this job."""
        async with self._bus.documents("LIMITS").follow(self._plan.job) as documents:
            async for document in documents:
                self.watch.learned(limits_in(document.data, self._plan.spec.config_fingerprint))
                self._announcer.compare()
                self._note_state("health has published limits")

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are being started."""
        self._facts.clear()
        self.watch.begins(order)
        self._announcer.show(is_for_job=order.slot == 0)
        self._note_state(f"round {order.round} began")

    def ends(self) -> None:
        """The ranks of the round are gone."""
        self.watch.ends()
        self._state = ""

    def stepped(self, rank: int) -> None:
        """A rank has made its first step: the timeout of its process group may be compared."""
        watched = self._rank(rank)
        page = None if watched is None else watched.reading()
        if page is not None:
            self._announcer.group_waits(page.group_timeout_s)

    def said(self, event: RankSaid) -> None:
        """A rank asks for a pause of the judgement, or for its end; or its own monitor ends it."""
        if isinstance(event.message, Hung):
            self._stalled(*hung(event.rank, event.message, self._rank(event.rank), self._clock))
            return
        fact = pause_fact(self._records, event, self.watch.state)
        if fact is not None:
            self._record(fact)

    def excuse(self, order: NameExcuse) -> actions.SendReport | None:
        """The answer whether a stalled rank may be waiting for a rank of ours; None if not.

        For a rank of ours: how far it had come in collectives, if that was not known before.
        """
        if self._is_ours(order):
            return self._seen_since(order)
        excuse = self.watch.excuse(order)
        if excuse is None:
            return None
        rank, for_s = excuse
        reason = f"rank {rank} is within its limit for {time_text(for_s)} more"
        return actions.SendReport(order.round, "excused", reason, order.rank, excuse_s=for_s)

    def _seen_since(self, order: NameExcuse) -> actions.SendReport | None:
        fact = self._facts.get(order.rank)
        entered_in = {} if entered_of(order) else self.watch.entered_in(order.rank)
        if fact is None or not entered_in:
            return None
        return actions.SendReport(
            order.round, "rank_stalled", order.reason, order.rank,
            waited_s=order.waited_s, fact=fact.id, entered_in=entered_in, is_fatal=fact.is_fatal,
        )  # fmt: skip

    def _live(self) -> Collection[int]:
        return self._agent.live_ranks

    def _is_ours(self, order: NameExcuse) -> bool:
        return order.node == self._plan.node  # our own ranks were compared before the report

    def _stalled(self, stalled: Stalled, process: ProcessState) -> None:
        order = self._agent.order
        if order is None:
            return
        place = stalled.place
        is_fatal = self._plan.restart_on_stall
        fact = self._records.rank_stalled(order, stalled, process, is_fatal=is_fatal)
        self._facts[place.rank] = fact
        self._record(fact)
        reason = stall_sentence(stalled, process)
        acts = self._agent.rank_stalled(
            place.rank, reason, stalled.waited_s, fact.id, self._clock.now(), place.entered_in,
            waits_for_others=bool(process.is_waiting_for_ranks), is_doubtful=process.is_doubtful,
            is_stopped=process.is_stopped, is_fatal=is_fatal,
        )  # fmt: skip
        self._do(acts)

    def _moving(self, moving: Moving) -> None:
        order, rank = self._agent.order, moving.stalled.place.rank
        fact = self._facts.pop(rank, None)
        if order is None or fact is None or self._agent.state == "stopping":
            return  # an action of a rank that is being stopped is not progress
        recovered = self._records.rank_recovered(order, moving, fact.id)
        self._record(recovered)
        reason = f"rank {rank} moves again after {time_text(moving.stalled_s)}"
        self._do(self._agent.rank_moves(rank, reason, recovered.id))

    def _warn(self, text: str) -> None:
        self._workdir.say(text, is_warning=True)

    def _note_state(self, why: str) -> None:
        """Record whether stalls are looked for."""
        state = self.watch.state
        if state and state != self._state:
            self._state = state
            named = tuple(sorted(self.watch.limits.named()))
            self._record(self._records.watch_changed(self._agent.round, state, why, sections=named))


def _limit_text(place: RankPosition) -> str:
    limit: Limit = place.limit
    named = limit.name in {"", place.section} or (limit.name, place.phase) in _TOLD_BY_PHASE
    of_what = "" if named else f" for {limit.name}"
    return f"limit{of_what} {time_text(limit.s)}, {limit.origin or limit.source}"


_TOLD_BY_PHASE = {("first-step", "first_step"), ("first-step", "start"), ("outside", "step")}


def _where(place: RankPosition) -> str:
    outside = _OUTSIDE.get(place.phase, "")
    if place.phase == "first_step" and place.signal == "collectives":
        outside = "since its last collective"
    if place.idle_s:
        outside += f", and has computed next to nothing for {time_text(place.idle_s)},"
    if not place.section:
        return outside
    return f"in {place.section}, {outside}" if place.phase == "compile" else f"in {place.section}"


_OUTSIDE = {
    "compile": "while torch compiles",
    "start": "since it was started",
    "first_step": "on the way to its first step",
    "step": "outside of all sections",
    "heartbeat": "since its last heartbeat",
}
