"""Watches ranks that another launcher has started: beats, stalls, how they ended."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from everstep import subjects
from everstep.bus.background import in_background
from everstep.bus.errors import BusError
from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import (
    BeatNow,
    Fact,
    NodeBeat,
    RankBeat,
    RankRecovered,
    RankStalled,
    RankStarted,
    StartRanks,
)
from everstep_services.agent.attached import attendance
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.attached.evidence import AttachedEvidence
from everstep_services.agent.attached.facts import AttachedFacts
from everstep_services.agent.attached.rank_stderr import RankStderr
from everstep_services.agent.attached.rank_watch import FoundPage, RankWatch
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.probes import notes
from everstep_services.agent.probes.node_checks import NodeChecks
from everstep_services.agent.probes.periodic.probes import PeriodicProbes
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.ranks.protocol import RankGone, RankRuns, RankSaid
from everstep_services.agent.ranks.setup import read_error
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.runtime.background import BackgroundLoops
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.recorder import StallFacts, stall_sentence
from everstep_services.agent.telemetry.numerics import NumericsRecorder, steps_back
from everstep_services.agent.telemetry.progress import beat_of
from everstep_services.agent.telemetry.step_figures import StepCounter, StepsMade
from everstep_services.agent.timings.monitor import RoundPosition, TimingMonitor
from trainer_sdk.page_content import CountedBy
from trainer_sdk.wire import Checkpointed, NumericsReported, Restarted, Stepped

log = logging.getLogger(__name__)

_BEAT_EVERY_S = 1.0
_SECTIONS_EVERY = 10
"""Beats."""
_LINGER_S = 10.0
_GOODBYE_WITHIN_S = 10.0
_CUT_OFF_GOODBYE_WITHIN_S = 2.0


@dataclass(eq=False, repr=False)
class AttachedStalls(StallFacts):
    """Records the findings of the monitor about ranks of another launcher: they end nothing."""

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


class AttachedService:
    """One agent, until the ranks have been gone for a while. It never signals a rank."""

    def __init__(
        self, plan: AttachedPlan, bus: Bus, clock: Clock, watching: RankWatch, voice: RankStderr
    ) -> None:
        place = plan.place
        self._plan = plan
        self._voice = voice
        self._bus = bus
        self._clock = clock
        self._watching = watching
        self._here = attendance.Attendance(
            place.local_size, place.max_restarts, _LINGER_S, clock.now()
        )
        self._records = AttachedFacts(plan, clock)
        self._orders: dict[int, StartRanks] = {}
        self._recorder = Recorder(bus, clock)
        self._steps = StepCounter(clock)
        self._ranks = RankSource(lambda: self._here.live, watching.ranks.rank, self._orders.get)
        self._stalls = AttachedStalls(
            plan, bus, clock, self._records, self._ranks, self._recorder.keep, voice.say,
            plan.others, self._stalls_changed,
        )  # fmt: skip
        examiner = NodeExaminer(plan.checks, notes.place(plan.state_dir, plan.node))
        self._checks = NodeChecks(examiner, self._records, clock, self._pids, self._recorder.keep)
        self._probes = PeriodicProbes(
            plan.checks, notes.place_of_probes(plan.state_dir, plan.node), plan.node, clock,
            self._records, self._pids, self._recorder.keep, voice.say,
            lambda: self._checks.failing,
        )  # fmt: skip
        self._checkpoints = NodeCheckpoints(self._records, clock, self._recorder.keep)
        self._numerics = NumericsRecorder(self._records, clock)
        self._evidence = AttachedEvidence(
            plan.job, bus, self._records, self._recorder.keep, clock, plan, watching.ranks
        )
        self._incident: str | None = None
        self._has_begun = False
        self._last_step: int | None = None
        self._sequence = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Run until there is nobody left to watch."""
        async with in_background(
            self._watching.watch_for_ever(),
            self._follow_ranks_for_ever(),
            self._stalls.watch.judge_for_ever(),
            self._stalls.watch.look_closer_for_ever(),
            self._stalls.follow_limits_for_ever(),
            self._checks.examine_for_ever(),
            self._probes.probe_for_ever(),
            self._beat_for_ever(),
            self._beat_when_hailed_for_ever(),
            self._recorder.record_for_ever(),
            self._evidence.collect_for_ever(),
            self._evidence.collect_beside_for_ever(),
            self._evidence.collect_later_for_ever(),
            self._tell_timings(),
        ):
            await self._over.wait()
            await self._say_goodbye()

    async def _tell_timings(self) -> None:
        plan = self._plan
        if plan.agent.timings:
            timings = TimingMonitor(
                plan.job, plan.node, self._bus, self._clock, self._part, self._watching.ranks.rank
            )
            await BackgroundLoops(log.warning).run(timings.tell_for_ever)

    def _part(self) -> RoundPosition | None:
        """The part of the round that is here; None while no rank is."""
        place, here = self._plan.place, self._here
        if not here.live:
            return None
        slots = -(-place.world_size // place.local_size) if place.local_size else 1
        return RoundPosition(here.round, place.slot, slots, place.world_size, here.all)

    def leave(self, reason: str) -> None:
        """The process must end; the ranks go on."""
        self._do(self._here.over(self._clock.now(), reason))
        self._over.set()

    # -- ranks -----------------------------------------------------------------------------------

    async def _follow_ranks_for_ever(self) -> None:
        while True:
            event = await self._watching.events.get()
            if isinstance(event, RankGone):
                self._voice.give_back()  # the reader of the ranks' output need not wait for us
            match event:
                case FoundPage():
                    self._came(event)
                case RankGone() if event.round == self._here.round:
                    await self._gone(event)
                case RankRuns() if event.round == self._here.round:
                    self._runs(event)
                case Stepped() if event.round == self._here.round:
                    self._stepped(event)
                case RankSaid() if event.round == self._here.round:
                    self._said(event)
                case _:
                    log.info("passed_over event=%s", event)
            self._watching.events.task_done()

    def _came(self, page: FoundPage) -> None:
        if not self._here.is_news(page.round, page.rank, page.pid):
            page.page.close()
            return
        log.info("rank_found round=%d rank=%d pid=%d", page.round, page.rank, page.pid)
        acts = self._here.came(page.round, page.rank, page.pid, self._clock.now())
        self._do(acts)
        order = self._records.order(page.round, page.rank, page.local_rank)
        if any(isinstance(act, attendance.RoundBegins) for act in acts):
            self._orders.clear()
            self._watching.begins(page.round, self._clock.now())
            self._steps.begins()
            self._stalls.begins(order, f"ranks were started by {self._plan.place.launcher}")
            self._checkpoints.begins(order)
            self._evidence.begins()
        self._orders[page.rank] = order
        self._evidence.came(page.rank, page.pid)
        self._watching.add(page)

    def _runs(self, event: RankRuns) -> None:
        order = self._orders[event.rank]
        started = RankStarted(
            **self._records.of_rank(order, event.rank), pid=event.pid, start="attached",
            start_s=0.0, log="",
        )  # fmt: skip
        self._recorder.keep(started)

    def _said(self, event: RankSaid) -> None:
        match event.message:
            case Checkpointed() as message:
                self._checkpoints.said(message)
            case NumericsReported() as message:
                facts = self._numerics.heard(event.round, message)
                self._steps.went_back(steps_back(facts))
                self._recorder.keep(*facts)
            case Restarted(is_without=True) as message:
                self._do(self._here.went_on(message.lost, self._clock.now()))
            case Restarted() as message:
                order = self._orders[event.rank]
                self._recorder.keep(*self._records.restarted(order, event.rank, message))
            case _:
                self._stalls.said(event)

    def _stepped(self, event: Stepped) -> None:
        self._say_progress(self._steps.first(event.step))
        self._do(self._here.stepped(self._clock.now()))
        self._stalls.stepped(event.rank)
        self._voice.give_back()

    async def _gone(self, event: RankGone) -> None:
        watched = self._watching.ranks.rank(event.rank)
        if watched is None or watched.pid != event.pid:
            return
        error = await asyncio.to_thread(read_error, watched.folder) if event.code != 0 else None
        # Python exits with 1 after an uncaught exception.
        code = 1 if error is not None and event.signal is None else event.code
        ending = RankExit(code, event.signal, error=error, lasted_s=event.lasted_s)
        fact_id, order = new_id(), self._orders[event.rank]
        acts = self._here.gone(event.rank, ending, fact_id, self._clock.now())
        self._note_incident(acts)
        self._recorder.keep(
            self._records.rank_exited(
                fact_id,
                order,
                event.rank,
                event.pid,
                ending,
                step=self._ranks.step(event.rank),
                incident=self._incident,
            )
        )
        self._do(acts)
        self._collect(acts)

    def _stalls_changed(self, fact: RankStalled | None, reason: str) -> None:
        now = self._clock.now()
        if fact is None:
            acts = self._here.moves(now)
        else:
            acts = self._here.stalled(fact.rank, reason, fact.id, now, fact.waited_s)
        self._note_incident(acts)
        self._do(acts)
        self._collect(acts)

    def _note_incident(self, acts: Sequence[attendance.Act]) -> None:
        if any(isinstance(act, attendance.IncidentOpens) for act in acts):
            self._incident = new_id()

    def _collect(self, acts: Sequence[attendance.Act]) -> None:
        for act in acts:
            if isinstance(act, attendance.IncidentOpens) and self._incident is not None:
                self._evidence.collect_for(self._here.round, self._incident, act.rank)

    def _do(self, acts: Sequence[attendance.Act]) -> None:
        for act in acts:
            for fact in self._told(act):
                self._recorder.keep(fact)

    def _told(self, act: attendance.Act) -> Sequence[Fact]:
        story, number = self._records, self._here.round
        match act:
            case attendance.RoundBegins():
                facts = [] if self._has_begun else story.begins()
                self._has_begun = True
                return [*facts, *story.round_begins(number)]
            case attendance.IncidentOpens():
                assert self._incident is not None
                return [story.opens(number, self._incident, act, self._last())]
            case attendance.RoundEnds():
                self._say_progress(self._steps.since(self._newest(), is_last=True))
                self._recorder.keep(*self._numerics.ends())
                return story.round_ends(act, self._incident, self._last())
            case attendance.IncidentCloses():
                incident, self._incident = self._incident, None
                assert incident is not None
                return [story.closes(number, incident, act)]
            case attendance.JobOver():
                log.info("over state=%s reason=%s", act.state, act.reason)
                return story.ends(act, number, self._last())

    # -- beats and facts -------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        while not self._over.is_set():
            self._beat("running" if self._here.live else "standby")
            self._say_progress(self._steps.since(self._newest()))
            self._stalls.note_state("it has learned more")
            now = self._clock.now()
            if self._here.is_over(now, launcher_lives=self._watching.launcher_lives):
                self._do(self._here.over(now))
                self._over.set()
            await self._clock.sleep(_BEAT_EVERY_S)

    async def _beat_when_hailed_for_ever(self) -> None:
        subject = subjects.hail(self._plan.job, self._plan.node)
        async with self._bus.subscribe(subject, BeatNow) as hails:
            async for _ in hails:
                self._beat("running" if self._here.live else "standby")

    def _beat(self, state: str) -> None:
        self._sequence += 1
        watch, teaches = self._stalls.watch, not self._sequence % _SECTIONS_EVERY
        beat = NodeBeat(
            job=self._plan.job,
            node=self._plan.node,
            sequence=self._sequence,
            at=self._clock.wall(),
            state=state if self._bus.connected else "cut_off",
            round=self._here.round or None,
            slot=self._plan.place.slot,
            ranks=tuple(self._rank_beat(rank) for rank in self._here.all),
            watch=watch.state,
            sections=watch.sections_seen() if teaches else (),
            config_fingerprint=self._plan.spec.config_fingerprint if teaches else "",
            limits=watch.in_force() if teaches and self._plan.tells_of_job else (),
        )
        beat = self._probes.with_probes(beat)
        self._bus.send(subjects.beat(self._plan.job, self._plan.node), beat)

    def _rank_beat(self, rank: int) -> RankBeat:
        if rank not in self._here.live:
            return RankBeat(rank=rank, state="exited", step=self._ranks.step(rank))
        standing = self._stalls.watch.standing(rank)
        return beat_of(rank, self._ranks.page(rank), standing, self._clock.now())

    def _say_progress(self, made: StepsMade | None) -> None:
        if made is not None and self._plan.tells_of_job:
            self._recorder.keep(self._records.progress_made(self._here.round, made))

    async def _say_goodbye(self) -> None:
        self._beat("leaving")
        within_s = _GOODBYE_WITHIN_S if self._bus.connected else _CUT_OFF_GOODBYE_WITHIN_S
        try:
            async with asyncio.timeout(within_s):
                await self._evidence.finish(within_s)
                await self._recorder.all_kept()
                await self._bus.flush(within_s)
        except (BusError, TimeoutError) as error:
            log.info("facts_wait_in_the_spool error=%s", error)

    # -- what is known of ranks ------------------------------------------------------------------

    def _pids(self) -> Collection[int]:
        return self._ranks.pids(self._here.live).values()

    def _newest(self) -> int | None:
        return self._ranks.step(min(self._here.all)) if self._here.all else None

    def _last(self) -> int | None:
        """The highest step that the script has reported."""
        pages = map(self._ranks.page, self._here.all)
        messages = [
            page.step for page in pages if page is not None and page.counted_by is CountedBy.SDK
        ]
        self._last_step = max([*messages, self._last_step or 0]) or None
        return self._last_step
