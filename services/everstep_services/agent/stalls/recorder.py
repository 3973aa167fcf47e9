"""The consequences of stalls: facts, reports to rendezvous, lines for people, learned limits."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.incident_causes import BY_MONITOR
from everstep.messages import (
    BadMessageError,
    Fact,
    LimitsDocument,
    NameExcuse,
    RankRecovered,
    RankStalled,
    StartRanks,
    decode_as,
)
from everstep_services.agent.core import actions
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.protocol import RankSaid
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.run_plan import AgentPlan
from everstep_services.agent.stalls.collectives import entered_of
from everstep_services.agent.stalls.judge import Moving, Stalled, WatchState
from everstep_services.agent.stalls.limits import BY_HAND, Limit
from everstep_services.agent.stalls.limits_table import (
    ExternalLimits,
    LimitNotices,
    LineWriter,
    time_text,
)
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


def stall_sentence(stalled: Stalled, process: ProcessState) -> str:
    """A stall for people: the rank, its position, the limit, and the state of its process."""
    place = stalled.place
    reason = (
        f"rank {place.rank} has made no progress for {time_text(stalled.waited_s)} "
        f"{_where(place)} ({_limit_text(place)})"
    )
    return f"{reason}; {process.text}" if process.text else reason


@dataclass(eq=False, repr=False)
class StallFacts:
    """Watches ranks for stalls, and records what it finds. What follows is decided elsewhere."""

    noted: ClassVar[frozenset[WatchState]] = frozenset({"armed", "learning", "paused"})
    """The states of the watch that are recorded when they begin."""

    _plan: AgentPlan
    _bus: Bus
    _clock: Clock
    _records: AgentFacts
    _ranks: RankSource
    _record: Callable[[Fact], None]
    _say: LineWriter
    _others: ExternalLimits

    def __post_init__(self) -> None:
        self._facts: dict[int, RankStalled] = {}
        self._round: int | None = None
        self._state: WatchState = ""
        ranks = self._ranks
        watched = MonitoredRanks(ranks.live, ranks.watched, self._stalled, self._moving, self._warn)
        self.watch = StallMonitor(self._plan.limits, self._clock, watched)
        self._announcer = LimitNotices(self.watch.limits, self._others, self._say)

    @property
    def _is_fatal(self) -> bool:
        """Whether a stall ends the round."""
        return False

    def _found(self, fact: RankStalled, stalled: Stalled, process: ProcessState) -> None:
        """A stall was recorded."""

    def _recovered(self, fact: RankRecovered, moving: Moving) -> None:
        """A rank whose stall was recorded has made progress."""

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
                self.note_state("health has published limits")

    def begins(self, order: StartRanks, why: str = "") -> None:
        """The ranks of a round are being started."""
        self._round = order.round
        self._facts.clear()
        self.watch.begins(order)
        self._announcer.show(is_for_job=order.slot == 0)
        self.note_state(why or f"round {order.round} began")

    def ends(self) -> None:
        """The ranks of the round are gone."""
        self.watch.ends()
        self._state = ""

    def stepped(self, rank: int) -> None:
        """A rank has made its first step: the timeout of its process group may be compared."""
        page = self._ranks.page(rank)
        if page is not None:
            self._announcer.group_waits(page.group_timeout_s)

    def said(self, event: RankSaid) -> None:
        """A rank asks for a pause of the judgement, or for its end; or its own monitor ends it."""
        match event.message:
            case Hung(limit_s=limit_s, is_over=True):
                hung = self._hung(event.rank, limit_s)
                self._moving(Moving(hung, limit_s, hung.place.step, None))
            case Hung(limit_s=limit_s):
                self._stalled(self._hung(event.rank, limit_s), ProcessState("", ""))
            case Paused(reason=reason, for_s=for_s):
                why = f"rank {event.rank} has paused it" + (f": {reason}" if reason else "")
                fact = self._records.watch_changed(event.round, "paused", why, until_s=for_s)
                self._record(fact)
            case Resumed(step=step):
                why = f"rank {event.rank} goes on after step {step}"
                self._record(self._records.watch_changed(event.round, self.watch.state, why))
            case _:
                log.info("not_done rank=%d said=%s", event.rank, event.message)

    def note_state(self, why: str) -> None:
        """Record whether stalls are looked for."""
        state = self.watch.state
        if state in self.noted and state != self._state:
            self._state = state
            named = tuple(sorted(self.watch.limits.named()))
            self._record(self._records.watch_changed(self._round, state, why, sections=named))

    def _hung(self, rank: int, limit_s: float) -> Stalled:
        """The stall of a rank that its own monitor ends; its process may be gone already."""
        watched = self._ranks.watched(rank)
        place = RankPosition(
            rank, "heartbeat", self._clock.now() - limit_s,
            Limit(limit_s, BY_HAND, "hard_timeout", "inprocess.Wrapper, which ends it"),
            step=self._ranks.step(rank), signal=BY_MONITOR,
            pid=None if watched is None else watched.pid,
        )  # fmt: skip
        return Stalled(place, limit_s)

    def _stalled(self, stalled: Stalled, process: ProcessState) -> None:
        rank = stalled.place.rank
        order = self._ranks.order(rank)
        if order is not None:
            place = stalled.place
            fact = RankStalled(
                **self._records.of_rank(order, rank), waited_s=round(stalled.waited_s, 3),
                limit_s=place.limit.s, limit_source=place.limit.source, phase=place.phase,
                signal=place.signal, section=place.section, step=place.step, pid=place.pid,
                blocked_in=process.text, process_state=process.letter,
                is_fatal=self._is_fatal and place.signal != BY_MONITOR,
                limit_name=place.limit.name, limit_origin=place.limit.origin,
                is_waiting_for_ranks=process.is_waiting_for_ranks,
            )  # fmt: skip
            self._facts[rank] = fact
            self._record(fact)
            self._found(fact, stalled, process)

    def _moving(self, moving: Moving) -> None:
        rank = moving.stalled.place.rank
        order, fact = self._ranks.order(rank), self._facts.pop(rank, None)
        if order is not None and fact is not None:
            recovered = RankRecovered(
                **self._records.of_rank(order, rank), stalled_s=round(moving.stalled_s, 3),
                stall=fact.id, step=moving.step, section=moving.section,
            )  # fmt: skip
            self._record(recovered)
            self._recovered(recovered, moving)

    def _warn(self, text: str) -> None:
        self._say(text, is_warning=True)


@dataclass(eq=False, repr=False)
class StallRecorder(StallFacts):
    """The stalls of ranks that this agent has started: the core decides what follows."""

    _agent: Agent
    _do: Callable[[Sequence[actions.Action]], None]

    @property
    def _is_fatal(self) -> bool:
        return self._plan.agent.restart_on_stall

    def excuse(self, order: NameExcuse) -> actions.SendReport | None:
        """The answer whether a stalled rank may be waiting for a rank of ours; None if not.

        For a rank of ours: how far it had come in collectives, if that was not known before.
        """
        if order.node == self._plan.node:  # our own ranks were compared before the report
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

    def _found(self, fact: RankStalled, stalled: Stalled, process: ProcessState) -> None:
        if fact.signal == BY_MONITOR:  # its end will end the round, unless it restarts
            self._do([actions.ShowLine(stall_sentence(stalled, process), is_warning=True)])
            return
        acts = self._agent.rank_stalled(
            fact.rank, stall_sentence(stalled, process), stalled.waited_s, fact.id,
            self._clock.now(), stalled.place.entered_in,
            waits_for_others=bool(process.is_waiting_for_ranks), is_doubtful=process.is_doubtful,
            is_stopped=process.is_stopped, is_fatal=fact.is_fatal,
        )  # fmt: skip
        self._do(acts)

    def _moving(self, moving: Moving) -> None:
        if self._agent.state != "stopping":  # an action of a rank that is stopped is not progress
            super()._moving(moving)

    def _recovered(self, fact: RankRecovered, moving: Moving) -> None:
        reason = f"rank {fact.rank} moves again after {time_text(moving.stalled_s)}"
        if moving.stalled.place.signal == BY_MONITOR:
            self._do([actions.ShowLine(reason)])
            return
        self._do(self._agent.rank_moves(fact.rank, reason, fact.id))


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
