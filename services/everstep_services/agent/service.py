"""The agent: hears orders and ranks, asks its domain, and does what it says."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from everstep import __version__, subjects
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Inbox
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import Fact, Join, Joined, Leave, Order, Report, Reported, StartRanks
from everstep_services.agent import acts
from everstep_services.agent.asker import Answers, Asker
from everstep_services.agent.domain import Agent, Limits
from everstep_services.agent.evidence import Evidence
from everstep_services.agent.failures import Exit
from everstep_services.agent.idleness import Idleness
from everstep_services.agent.keeper import Keeper
from everstep_services.agent.keeping import (
    ForgeReady,
    ForgeUnfit,
    KeeperEvent,
    KeeperLost,
    KeeperLostError,
    RankGone,
    RankRuns,
    RankStepped,
    ScriptEnded,
    StartRefused,
    Stopped,
)
from everstep_services.agent.plan import RunPlan
from everstep_services.agent.ports import Reserved
from everstep_services.agent.progress import Progress
from everstep_services.agent.records import Records
from everstep_services.agent.workplace import Workplace

log = logging.getLogger(__name__)

_PREEMPTING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_GOODBYE_WITHIN_S = 2.0
_NOBODY_WITHIN_S = 30.0
"""A new agent gives up when nobody has answered it for so long; one that was answered never."""
_KEEPER_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keeper that runs already, and how to get another when it is lost."""

    first: Keeper
    another: Callable[[], AbstractAsyncContextManager[Keeper]]


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
    ) -> None:
        self.instance = instance
        self._plan = plan
        self._bus = bus
        self._keeper = keepers.first
        self._open_keeper = keepers.another
        self._workplace = workplace
        self._clock = clock
        self._agent = Agent(limits)
        self._records = Records(plan.job, plan.node)
        self._evidence = Evidence(plan.job, bus, workplace.logs, self._records)
        self._progress = Progress(plan, self._agent, lambda: self._keeper, self._records, clock)
        answers = Answers(
            joined=self._joined,
            reported=self._reported,
            refused=self._refused,
            unanswered=self._unanswered,
        )
        self._asker = Asker(bus, clock, plan.job, answers)
        self._work: asyncio.Queue[acts.Start | acts.Stop] = asyncio.Queue()
        self._signals: asyncio.Queue[acts.Forward] = asyncio.Queue()
        self._facts: asyncio.Queue[Fact] = asyncio.Queue()
        self._idleness = Idleness(clock)
        self._due = asyncio.Event()
        self._was_answered = False
        self._stop_s = self._evidence_s = 0.0
        self._reserved: Reserved | None = None
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
                    self._work_for_ever,
                    self._signal_for_ever,
                    self._tick_for_ever,
                    self._record_for_ever,
                    self._evidence.collect_for_ever,
                    self._follow_bus_for_ever,
                    self._beat_for_ever,
                )
            ]
            self._do(self._agent.begin())
            exiting = await self._exit
            await self._say_goodbye(exiting)
            for loop in loops:
                loop.cancel()
        return exiting.code

    def signalled(self, number: int) -> None:
        """Somebody has sent a signal to this process."""
        name, now = signal.Signals(number).name, self._clock.now()
        if number in _PREEMPTING:
            self._do(self._agent.preempted(number, name, now))
        else:
            self._do(self._agent.interrupted(number, name, now))

    # -- what happens ----------------------------------------------------------------------------

    async def _hear_orders_for_ever(self) -> None:
        job = self._plan.job
        async with (
            self._bus.subscribe(subjects.order(job), Order) as to_all,
            self._bus.subscribe(subjects.order(job, self.instance), Order) as to_us,
            asyncio.TaskGroup() as tasks,
        ):
            for inbox in (to_all, to_us):
                tasks.create_task(self._hear(inbox))

    async def _hear(self, inbox: Inbox[Order]) -> None:
        while True:
            order = await inbox.get()
            what = type(order).__name__
            log.info("order type=%s round=%d reason=%s", what, order.round, order.reason)
            self._do(self._agent.ordered(order, self._clock.now()))

    async def _hear_ranks_for_ever(self) -> None:
        await self._hear_keeper()
        while True:
            await self._clock.sleep(_KEEPER_AGAIN_S)
            async with self._open_keeper() as self._keeper:
                await self._hear_keeper()

    async def _hear_keeper(self) -> None:
        """Until it is lost."""
        while True:
            event = await self._keeper.events.get()
            await self._ranks_did(event)
            if isinstance(event, KeeperLost):
                return

    async def _ranks_did(self, event: KeeperEvent) -> None:
        order = self._agent.order
        match event:
            case ForgeReady():
                log.info("forge_ready took_s=%.2f preloaded=%s", event.took_s, event.preloaded)
            case ForgeUnfit():
                self._workplace.say(f"ranks start cold: {event.reason}", is_warning=True)
            case KeeperLost():
                self._keeper_lost(event)
            case _ if order is None or event.round != order.round:
                log.info("late_event event=%s", event)
            case _:
                await self._rank_did(order, event)

    async def _rank_did(
        self,
        order: StartRanks,
        event: RankRuns | RankStepped | ScriptEnded | RankGone | StartRefused,
    ) -> None:
        match event:
            case StartRefused():
                self._do(self._agent.start_failed(event.round, event.reason))
            case RankRuns():
                self._rank_runs(order, event)
            case RankStepped():
                first = self._progress.stepped(order, event.step)
                if first is not None:
                    self._facts.put_nowait(first)
                self._do(self._agent.rank_stepped(event.rank, event.step))
            case ScriptEnded() if event.code == 0:
                self._do(self._agent.script_returned(event.rank, self._clock.now()))
            case ScriptEnded():
                pass  # its exit says the rest
            case RankGone():
                await self._rank_gone(order, event)

    def _rank_runs(self, order: StartRanks, event: RankRuns) -> None:
        self._progress.runs(event)
        self._workplace.describe(order, event.rank, event.pid)
        started = self._records.rank_started(
            order,
            event.rank,
            pid=event.pid,
            start=event.start,
            start_s=event.start_s,
            log=str(self._workplace.logs.folder(event.round, event.rank)),
        )
        self._facts.put_nowait(started)
        self._do(self._agent.rank_runs(event.rank))

    async def _rank_gone(self, order: StartRanks, event: RankGone) -> None:
        ending = Exit(
            code=event.code,
            signal=event.signal,
            core_dumped=event.core_dumped,
            error=None if event.code == 0 else await self._keeper.error(event.rank),
            lasted_s=event.lasted_s,
        )
        if self._agent.state != "stopping":
            step = self._progress.step(event.rank)
            self._evidence.rank_exited(order, event.rank, event.pid, ending, step)
        self._do(self._agent.rank_gone(event.rank, ending))

    def _keeper_lost(self, event: KeeperLost) -> None:
        order = self._agent.order
        self._workplace.say(event.reason, is_warning=True)
        if order is not None:
            lost = Exit()
            for rank in range(order.first_rank, order.first_rank + order.ranks):
                self._do(self._agent.rank_gone(rank, lost))

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
        was_away = False
        while True:
            await self._clock.sleep(0.25)
            if not self._bus.connected:
                if not was_away:
                    self._workplace.say("the bus is away: the ranks run on", is_warning=True)
                was_away = True
            elif was_away:
                was_away = False
                self._workplace.say("the bus is back")
                self._do(self._agent.bus_back())

    async def _beat_for_ever(self) -> None:
        subject = subjects.beat(self._plan.job, self._plan.node)
        while True:
            self._bus.send(subject, self._progress.beat(cut_off=not self._bus.connected))
            for fact in self._progress.facts():
                self._facts.put_nowait(fact)
            if self._agent.last_ranks:
                pids = self._progress.pids(self._agent.last_ranks)
                idle_s = await asyncio.to_thread(self._idleness.look, pids)
                self._do(self._agent.idle(idle_s))
            await self._clock.sleep(1.0)

    # -- what is done about it ---------------------------------------------------------------------

    def _do(self, wanted: Sequence[acts.Act]) -> None:
        for act in wanted:
            match act:
                case acts.Join():
                    self._asker.join(self._join)
                case acts.Tell():
                    self._tell(act)
                case acts.Start() | acts.Stop():
                    self._work.put_nowait(act)
                case acts.Forward():
                    self._signals.put_nowait(act)
                case acts.Say():
                    self._workplace.say(act.text, is_warning=act.is_warning)
                case acts.Exiting():
                    self._exiting(act)
        self._due.set()

    def _exiting(self, exiting: acts.Exiting) -> None:
        if not self._exit.done():
            self._exit.set_result(exiting)

    def _tell(self, tell: acts.Tell) -> None:
        order = self._agent.order
        assert order is not None
        ending = tell.exit
        report = Report(
            job=self._plan.job,
            node=self._plan.node,
            instance=self.instance,
            slot=order.slot,
            round=tell.round,
            event=tell.event,
            reason=tell.reason,
            fact=None if tell.rank is None else self._evidence.fact_of(tell.round, tell.rank),
            rank=tell.rank,
            step=self._progress.last_step() if tell.step is None else tell.step,
            fingerprint="" if ending is None else ending.fingerprint,
            exit_code=None if ending is None else ending.code,
            last_progress_age_s=self._progress.age_s(),
            grace_s=tell.grace_s,
            warm_ranks=self._progress.warm_ranks,
        )
        self._asker.tell(tell, report)

    def _join(self) -> Join:
        plan, agent = self._plan, self._agent
        if self._reserved is None:
            self._reserved = Reserved()
        return Join(
            job=plan.job,
            node=plan.node,
            instance=self.instance,
            spec=plan.spec,
            allocation=plan.allocation,
            address=plan.address,
            ranks=plan.ranks_per_node,
            scheduler=plan.scheduler.name,
            scheduler_job=plan.scheduler.job,
            attempt=plan.scheduler.attempt,
            infra_rank=plan.infra_rank,
            failure_domain=plan.domain,
            topology=plan.topology,
            last_round=agent.last_round,
            last_slot=agent.last_slot if agent.order is None else agent.order.slot,
            last_step=self._progress.last_step(),
            warm=self._keeper.warm,
            running_round=agent.running_round,
            master_port=self._reserved.port,
            evidence_s=self._evidence_s,
            stop_s=self._stop_s,
            device="cpu",
            version=__version__,
        )

    async def _work_for_ever(self) -> None:
        while True:
            match await self._work.get():
                case acts.Start() as start:
                    await self._start(start.order)
                case acts.Stop() as stop:
                    await self._stop(stop)

    async def _start(self, order: StartRanks) -> None:
        if self._agent.order != order or self._agent.state != "starting":
            return
        self._progress.begins(order)
        if self._reserved is not None and order.slot == 0:
            self._reserved.free()
            self._reserved = None
        try:
            batch = await asyncio.to_thread(self._workplace.prepare, order)
            await self._keeper.start(batch)
        except (OSError, EverstepError) as error:
            self._do(self._agent.start_failed(order.round, f"its ranks cannot be started: {error}"))
        else:
            self._workplace.show(order)

    async def _signal_for_ever(self) -> None:
        while True:
            act = await self._signals.get()
            try:
                unmoved = await self._keeper.signal(act.number, act.ranks)
            except (EverstepError, TimeoutError) as error:
                log.warning("signal_not_sent signal=%d error=%s", act.number, error)
                continue
            if unmoved:
                name = signal.Signals(act.number).name
                text = f"{name} was not passed on to ranks {_list(unmoved)}: they do not handle it"
                self._workplace.say(text)

    async def _stop(self, stop: acts.Stop) -> None:
        order = self._agent.order
        assert order is not None
        try:
            outcome = await self._keeper.stop(stop.grace_s)
        except KeeperLostError:
            outcome = Stopped((), (), 0, (), 0.0)  # nothing outlives its warden
        self._stop_s = outcome.stop_s
        if outcome.ranks:
            stopped = self._records.ranks_stopped(
                order, outcome.ranks, outcome.killed, evidence_s=0.0, stop_s=outcome.stop_s
            )
            self._facts.put_nowait(stopped)
        if stop.incident is not None:
            self._evidence.round_stopped(order, stop.incident, outcome.ranks)
        for fact in self._progress.ends():
            self._facts.put_nowait(fact)
        await self._workplace.hide()
        self._do(self._agent.stopped(stop.round))

    async def _record_for_ever(self) -> None:
        while True:
            await self._bus.record(await self._facts.get())
            self._facts.task_done()

    # -- answers -----------------------------------------------------------------------------------

    def _joined(self, reply: Joined) -> None:
        self._was_answered = True
        self._do(self._agent.joined(reply, self._clock.now()))

    def _reported(self, tell: acts.Tell, reply: Reported) -> None:
        if tell.rank is not None and reply.incident is not None:
            self._evidence.belongs_to(tell.round, tell.rank, reply.incident)
        self._do(self._agent.reported(tell, reply))

    def _refused(self, reason: str) -> None:
        self._do(self._agent.give_up(1, reason))

    def _unanswered(self, for_s: float, reason: str) -> None:
        log.info("rendezvous_silent for_s=%.1f error=%s", for_s, reason)
        if not self._was_answered and for_s > _NOBODY_WITHIN_S:
            text = f"rendezvous has not answered for {for_s:.0f} s: {reason}"
            self._do(self._agent.give_up(94, text))

    async def _say_goodbye(self, exiting: acts.Exiting) -> None:
        if exiting.code:
            self._workplace.say(exiting.reason, is_warning=True)
        self._bus.send(
            subjects.beat(self._plan.job, self._plan.node), self._progress.beat(cut_off=False)
        )
        await self._evidence.finish(_GOODBYE_WITHIN_S)
        if not exiting.is_sent:
            leave = Leave(
                job=self._plan.job,
                node=self._plan.node,
                instance=self.instance,
                round=self._agent.round or 0,
                cause=exiting.cause,
                reason=exiting.reason,
                exit_code=exiting.code,
            )
            await self._asker.leave(leave, _GOODBYE_WITHIN_S)
        try:
            async with asyncio.timeout(_GOODBYE_WITHIN_S):
                await self._facts.join()
                await self._bus.flush(_GOODBYE_WITHIN_S)
        except (BusError, TimeoutError) as error:
            log.info("facts_wait_in_the_spool error=%s", error)


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
