"""The agent: hears orders and ranks, asks its domain, and has done what it says."""

import asyncio
import logging
import signal
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from everstep import subjects
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Inbox
from everstep.clock import Clock
from everstep.messages import Fact, Joined, Order, Reported, SaveCheckpoint, StartRanks
from everstep_services.agent import acts
from everstep_services.agent.asker import Answers, Asker
from everstep_services.agent.checks import Checks
from everstep_services.agent.collecting import COLLECTORS, collect
from everstep_services.agent.domain import Agent, Limits
from everstep_services.agent.evidence import Evidence
from everstep_services.agent.failures import Exit
from everstep_services.agent.idleness import Idleness
from everstep_services.agent.plan import RunPlan
from everstep_services.agent.probes import notes
from everstep_services.agent.probes.examiner import Examiner
from everstep_services.agent.progress import Progress
from everstep_services.agent.questions import Questions
from everstep_services.agent.ranks.keeping import (
    ForgeReady,
    ForgeUnfit,
    KeeperEvent,
    KeeperLost,
    RankGone,
    RankRuns,
    RankSaid,
    RankStepped,
    ScriptEnded,
    StartRefused,
    Stopped,
)
from everstep_services.agent.ranks.watch import WatchedRank
from everstep_services.agent.records import Records
from everstep_services.agent.saves import Saves
from everstep_services.agent.stalls.desk import Stalls
from everstep_services.agent.stalls.table import Others
from everstep_services.agent.work import Keepers, Told, Work
from everstep_services.agent.workplace import Workplace
from trainer_sdk.page import PageReading
from trainer_sdk.wire import Injected, Stopping

if TYPE_CHECKING:
    from everstep_services.agent.injection.harm import Harm
    from everstep_services.agent.injection.service import Injection

log = logging.getLogger(__name__)

_USERS = {signal.SIGUSR1, signal.SIGUSR2}
_BEAT_EVERY_S = 1.0
_LOOK_AT_BUS_EVERY_S = 0.25
_GOODBYE_WITHIN_S = 2.0
_NOBODY_WITHIN_S = 20.0
"""A new agent gives up when nobody has answered it for so long; one that was answered never."""
_UNREACHABLE = 94


class AgentService:
    """One agent, from its first `join` to its exit code.

    Everything that happens comes to the domain on the loop's thread, one at a time; what it
    wants done is handed to loops that may wait.
    """

    def __init__(  # noqa: PLR0913  each is a port or what was asked for
        self,
        plan: RunPlan,
        bus: Bus,
        keepers: Keepers,
        workplace: Workplace,
        clock: Clock,
        instance: str,
        *,
        limits: Limits,
        others: Others,
        harm: "Harm | None" = None,
    ) -> None:
        self._plan = plan
        self._bus = bus
        self._workplace = workplace
        self._clock = clock
        self._instance = instance
        self._agent = Agent(limits)
        self._records = Records(plan.job, plan.node, clock)
        self._evidence = Evidence(plan.job, bus, workplace, self._records)
        told = Told(self._begins, self._not_started, self._stops, self._stopped)
        self._work = Work(keepers, workplace, clock, told)
        self._progress = Progress(plan, self._agent, self._page, self._records, clock)
        self._questions = Questions(plan, self._agent, self._progress, instance)
        answers = Answers(self._joined, self._reported, self._refused, self._unanswered)
        self._asker = Asker(bus, clock, plan.job, answers)
        self._facts: asyncio.Queue[Fact] = asyncio.Queue()
        self._stalls = Stalls(
            plan, bus, self._agent, self._watched, self._records, workplace, clock,
            others, self._facts.put_nowait, self._do,
        )  # fmt: skip
        self._progress.stalls = self._stalls.watch
        self._saves = Saves(
            plan, self._agent, self._watched, self._records, clock, self._facts.put_nowait
        )
        examiner = Examiner(plan.checks, notes.place(plan.state_dir, plan.node))
        self._checks = Checks(examiner, self._records, clock, self._pids, self._facts.put_nowait)
        self._questions.checks = self._checks
        self._injection = None if harm is None else self._opened_to(harm)
        self._idleness = Idleness(clock)
        self._due = asyncio.Event()
        self._was_answered = False
        self._unfit = ""
        """Why the forge cannot fork, until it was said."""
        self._exit: asyncio.Future[acts.Exiting] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The exit code, once we are no longer needed."""
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop(), name=loop.__name__)
                for loop in (
                    self._hear_orders_for_ever,
                    self._hear_ranks_for_ever,
                    self._asker.ask_for_ever,
                    self._work.start_and_stop_for_ever,
                    self._work.signal_for_ever,
                    self._tick_for_ever,
                    self._record_for_ever,
                    self._evidence.collect_for_ever,
                    self._evidence.collect_later_for_ever,
                    self._checks.examine_for_ever,
                    self._stalls.watch.judge_for_ever,
                    self._stalls.watch.look_closer_for_ever,
                    self._stalls.follow_limits_for_ever,
                    self._follow_bus_for_ever,
                    self._beat_for_ever,
                    self._hear_faults_for_ever,
                )
            ]
            exiting = await self._exit
            await self._say_goodbye(exiting)
            for loop in loops:
                loop.cancel()
        return exiting.code

    def signalled(self, number: int) -> None:
        """Somebody has sent a signal to this process."""
        name, now = signal.Signals(number).name, self._clock.now()
        if name in self._plan.preempt_signals:
            self._do(self._agent.preempted(number, name, now))
        elif number in _USERS:
            self._do([acts.Forward(number)])
        else:
            self._do(self._agent.interrupted(number, name, now))

    # -- orders and answers ----------------------------------------------------------------------

    async def _hear_orders_for_ever(self) -> None:
        job = self._plan.job
        async with (
            self._bus.subscribe(subjects.order(job), Order) as to_all,
            self._bus.subscribe(subjects.order(job, self._instance), Order) as to_us,
            asyncio.TaskGroup() as tasks,
        ):
            for inbox in (to_all, to_us):
                tasks.create_task(self._hear(inbox))
            await self._checks.known_within(self._plan.checks.join_waits_s)
            # Not before we can be heard: who does not hear its orders is taken to be gone.
            self._do(self._agent.begin())

    async def _hear(self, inbox: Inbox[Order]) -> None:
        while True:
            order = await inbox.get()
            what = type(order).__name__
            log.info("order type=%s round=%d reason=%s", what, order.round, order.reason)
            if isinstance(order, SaveCheckpoint):
                self._do(self._agent.asked_to_save(order, self._clock.now()))
            else:
                self._do(self._agent.ordered(order))

    def _joined(self, reply: Joined) -> None:
        self._was_answered = True
        self._do(self._agent.joined(reply, self._clock.now()))

    def _reported(self, tell: acts.Tell, reply: Reported) -> None:
        if tell.rank is not None and reply.incident is not None and tell.event != "excused":
            self._evidence.belongs_to(tell.round, tell.rank, reply.incident)
        self._do(self._agent.reported(tell, reply))

    def _refused(self, reason: str) -> None:
        self._do(self._agent.give_up(1, reason))

    def _unanswered(self, for_s: float, reason: str) -> None:
        log.info("rendezvous_silent for_s=%.1f error=%s", for_s, reason)
        if not self._was_answered and for_s > _NOBODY_WITHIN_S:
            text = f"rendezvous has not answered for {for_s:.0f} s: {reason}"
            self._do(self._agent.give_up(_UNREACHABLE, text))

    # -- ranks -----------------------------------------------------------------------------------

    async def _hear_ranks_for_ever(self) -> None:
        async for event in self._work.events():
            order = self._agent.order
            match event:
                case ForgeReady() | ForgeUnfit():
                    self._forge_is(event)
                case KeeperLost():
                    self._keeper_lost(event)
                case _ if order is None or event.round != order.round:
                    log.info("late_event event=%s", event)
                case _:
                    await self._rank_did(order, event)

    def _forge_is(self, event: ForgeReady | ForgeUnfit) -> None:
        self._questions.is_warm = isinstance(event, ForgeReady)
        if isinstance(event, ForgeReady):
            log.info("forge_ready took_s=%.2f preloaded=%s", event.took_s, event.preloaded)
        else:
            self._unfit = event.reason
            log.info("forge_unfit final=%s reason=%s", event.is_final, event.reason)

    async def _rank_did(self, order: StartRanks, event: KeeperEvent) -> None:
        match event:
            case StartRefused():
                self._do(self._agent.start_failed(event.round, event.reason))
            case RankRuns():
                self._rank_runs(order, event)
            case RankStepped():
                self._rank_stepped(order, event)
            case RankSaid():
                self._rank_said(order, event)
            case ScriptEnded():
                await self._script_ended(order, event)
            case RankGone():
                await self._rank_gone(order, event)
            case _:
                pass

    def _rank_runs(self, order: StartRanks, event: RankRuns) -> None:
        self._progress.runs(event)
        self._do(self._agent.rank_runs(event.rank))
        if event.start == "cold" and self._unfit:
            self._workplace.say(f"ranks start cold: {self._unfit}", is_warning=True)
            self._unfit = ""
        self._evidence.rank_runs(order, event.rank, event.pid)
        started = self._records.rank_started(
            order,
            event.rank,
            pid=event.pid,
            start=event.start,
            start_s=event.start_s,
            log=str(self._workplace.logs.folder(event.round, event.rank)),
        )
        self._facts.put_nowait(started)

    def _rank_said(self, order: StartRanks, event: RankSaid) -> None:
        match event.said:
            case Injected() as said:
                self._facts.put_nowait(self._records.fault_injected(order, event.rank, said))
            case Stopping() as said:
                self._do(self._agent.rank_stops(event.rank, said.step, self._clock.now()))
            case _:
                self._stalls.said(event)

    def _rank_stepped(self, order: StartRanks, event: RankStepped) -> None:
        first = self._progress.stepped(order, event.step)
        if first is not None:
            self._facts.put_nowait(first)
        self._stalls.stepped(event.rank)
        self._do(self._agent.rank_stepped(event.rank, event.step))

    async def _script_ended(self, order: StartRanks, event: ScriptEnded) -> None:
        """Not every failure is one for us yet: a script may exit as it likes, and take its time."""
        if not event.code:
            self._do(self._agent.script_returned(event.rank, self._clock.now()))
            return
        error = await self._work.keeper.error(event.rank)
        if error is None or error.name == "SystemExit" or not self._is_at_work(event.round):
            return
        page = self._work.keeper.page(event.rank)
        lasted_s = self._clock.now() - page.script_s if page is not None else 0.0
        ending = Exit(code=event.code, error=error, lasted_s=lasted_s)
        pid = 0 if page is None else page.pid
        step = self._progress.step(event.rank)
        self._evidence.rank_exited(order, event.rank, pid, ending, step)
        self._do(self._agent.script_failed(event.rank, ending))

    async def _rank_gone(self, order: StartRanks, event: RankGone) -> None:
        # A signal leaves no exception; and who was killed is told before who noticed it.
        error = await self._work.keeper.error(event.rank) if event.code else None
        if not self._is_at_work(event.round):
            return  # meanwhile it was stopped, or another round has begun
        stopped_after = self._saves.has_seen(event.rank)
        if stopped_after is not None:
            self._do(self._agent.rank_stops(event.rank, stopped_after, self._clock.now()))
        ending = Exit(event.code, event.signal, event.core_dumped, error, lasted_s=event.lasted_s)
        if self._evidence.fact_of(order.round, event.rank) is None:
            step = self._progress.step(event.rank)
            self._evidence.rank_exited(order, event.rank, event.pid, ending, step)
        self._do(self._agent.rank_gone(event.rank, ending))

    def _is_at_work(self, round: int) -> bool:
        """Its ranks run here, and were not ordered to stop."""
        order = self._agent.order
        return order is not None and order.round == round and self._agent.state != "stopping"

    def _keeper_lost(self, event: KeeperLost) -> None:
        order = self._agent.order
        self._questions.is_warm = False
        self._workplace.say(event.reason, is_warning=True)
        if order is not None:
            for rank in range(order.first_rank, order.first_rank + order.ranks):
                self._do(self._agent.rank_gone(rank, Exit()))

    def _pids(self) -> Collection[int]:
        return self._progress.pids(self._agent.live_ranks).values()

    def _watched(self, rank: int) -> WatchedRank | None:
        return self._work.keeper.watch.rank(rank)

    def _page(self, rank: int) -> PageReading | None:
        return self._work.keeper.page(rank)

    def _begins(self, start: acts.Start) -> bool:
        if self._agent.order != start.order or self._agent.state != "starting":
            return False
        self._progress.begins(start.order)
        self._stalls.begins(start.order)
        self._questions.free_port(start.order)
        return True

    def _not_started(self, start: acts.Start, reason: str) -> None:
        self._do(self._agent.start_failed(start.order.round, reason))

    async def _stops(self, stop: acts.Stop) -> None:
        """Bounded by the order, and in practice by a few reads: every restart waits for it."""
        self._questions.evidence_s = 0.0
        if stop.incident is None or not stop.evidence_s:
            return
        began, ranks = self._clock.now(), self._work.keeper.watch.seen()
        pieces = await collect(COLLECTORS, ranks, stop.evidence_s, self._clock)
        self._questions.evidence_s = self._clock.now() - began
        self._evidence.collected(stop.round, stop.incident, pieces)

    def _stopped(self, stop: acts.Stop, outcome: Stopped) -> None:
        order = self._agent.order
        assert order is not None
        self._questions.stop_s = outcome.stop_s
        last: list[Fact] = list(self._progress.ends())
        self._stalls.ends()
        self._do(self._agent.stopped(stop.round))
        if outcome.ranks:
            last.append(
                self._records.ranks_stopped(order, outcome, evidence_s=self._questions.evidence_s)
            )
        if stop.incident is not None:
            self._evidence.round_stopped(order, stop.incident, outcome.ranks)
        for fact in last:
            self._facts.put_nowait(fact)

    # -- faults on purpose -----------------------------------------------------------------------

    def _opened_to(self, harm: "Harm") -> "Injection":
        from everstep_services.agent.injection.service import Injection, Ranks

        watched = self._watched
        ranks = Ranks(
            order=lambda: self._agent.order,
            folder=lambda rank: None if (known := watched(rank)) is None else known.folder,
            pid=lambda rank: 0 if (known := watched(rank)) is None or known.gone else known.pid,
            step=self._progress.step,
        )
        return Injection(self._plan, self._bus, harm, ranks, self._workplace.say)

    async def _hear_faults_for_ever(self) -> None:
        if self._injection is not None:
            await self._injection.hear_for_ever(self._instance)

    # -- time, the bus, beats --------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            self._due.clear()
            wake_at = self._agent.wake_at
            wait_s = None if wake_at is None else max(0.0, wake_at - self._clock.now())
            try:
                async with asyncio.timeout(wait_s):
                    await self._due.wait()
            except TimeoutError:
                self._do(self._agent.tick(self._clock.now()))

    async def _follow_bus_for_ever(self) -> None:
        """Notice that the bus was away: what was said meanwhile, nobody says again."""
        was_away, returns = False, self._bus.returns
        while True:
            await self._clock.sleep(_LOOK_AT_BUS_EVERY_S)
            if not self._bus.connected:
                if not was_away:
                    self._workplace.say("the bus is away: the ranks run on", is_warning=True)
                was_away = True
            elif was_away or self._bus.returns != returns:
                was_away, returns = False, self._bus.returns
                self._workplace.say("the bus is back")
                self._do(self._agent.bus_back())

    async def _beat_for_ever(self) -> None:
        while True:
            self._beat()
            for fact in self._progress.facts():
                self._facts.put_nowait(fact)
            if self._agent.last_ranks:
                pids = self._progress.pids(self._agent.last_ranks)
                idle_s = await asyncio.to_thread(self._idleness.look, pids)
                self._do(self._agent.idle(idle_s))
            await self._clock.sleep(_BEAT_EVERY_S)

    def _beat(self) -> None:
        beat = self._progress.beat(cut_off=not self._bus.connected)
        self._bus.send(subjects.beat(self._plan.job, self._plan.node), beat)

    async def _record_for_ever(self) -> None:
        while True:
            await self._bus.record(await self._facts.get())
            self._facts.task_done()

    # -- what is done about it -------------------------------------------------------------------

    def _do(self, wanted: Sequence[acts.Act]) -> None:
        for act in wanted:
            match act:
                case acts.Join():
                    self._asker.join(self._questions.join)
                case acts.Tell():
                    self._tell(act)
                case acts.Start() | acts.Stop() | acts.Forward():
                    self._work.do(act)
                case acts.Say():
                    self._workplace.say(act.text, is_warning=act.is_warning)
                case acts.Exiting():
                    self._exiting(act)
                case acts.Excuse() | acts.Check():
                    self._answer(act)
                case _:
                    self._save(act)
        self._due.set()

    def _save(self, act: acts.PassOn | acts.AskToStop | acts.Reach | acts.OnRecord) -> None:
        match act:
            case acts.PassOn():
                if (signalled := self._saves.passed_on(act)) is not None:
                    self._work.do(signalled)
            case acts.AskToStop():
                self._saves.ask_to_stop(act)
            case acts.Reach():
                self._tell(self._saves.reached(act))
            case _:
                self._saves.put_on_record(act)

    def _answer(self, asked: acts.Excuse | acts.Check) -> None:
        if isinstance(asked, acts.Check):
            self._checks.ask(asked.order)
        elif (told := self._stalls.excuse(asked.order)) is not None:
            self._tell(told)

    def _tell(self, tell: acts.Tell) -> None:
        order = self._agent.order
        assert order is not None
        fact = tell.fact
        if fact is None and tell.rank is not None:
            fact = self._evidence.fact_of(tell.round, tell.rank)
        self._asker.tell(tell, self._questions.report(tell, order, fact))

    def _exiting(self, exiting: acts.Exiting) -> None:
        if not self._exit.done():
            self._exit.set_result(exiting)

    async def _say_goodbye(self, exiting: acts.Exiting) -> None:
        if exiting.code or exiting.cause == "refused":
            self._workplace.say(exiting.reason, is_warning=bool(exiting.code))
        self._beat()
        await self._workplace.drain()
        await self._evidence.finish(_GOODBYE_WITHIN_S)
        if not exiting.is_sent:
            await self._asker.leave(self._questions.leave(exiting), _GOODBYE_WITHIN_S)
        try:
            async with asyncio.timeout(_GOODBYE_WITHIN_S):
                await self._facts.join()
                await self._bus.flush(_GOODBYE_WITHIN_S)
        except (BusError, TimeoutError) as error:
            log.info("facts_wait_in_the_spool error=%s", error)
