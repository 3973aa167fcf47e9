"""The agent's loops: they hear orders and signals, ask the core, and carry out its actions."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from everstep import subjects
from everstep.bus.errors import BusError
from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus, Inbox
from everstep.clock import Clock
from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    Joined,
    MeasureNetwork,
    NameExcuse,
    Order,
    ReleaseImages,
    Reported,
    RunChecks,
    SaveCheckpoint,
    SaveParked,
    StartRanks,
    StopRanks,
)
from everstep_services.agent.allocation_folder import AllocationLink
from everstep_services.agent.collectors.registry import collectors
from everstep_services.agent.core import actions
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.departure import SAVED
from everstep_services.agent.output.log_upload import LogUploader
from everstep_services.agent.probes import notes
from everstep_services.agent.probes.node_checks import NodeChecks
from everstep_services.agent.probes.periodic.probes import PeriodicProbes
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.ranks.device_memory import has_devices
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.rendezvous_client.client import RendezvousClient
from everstep_services.agent.rendezvous_client.script_requests import ScriptRequests
from everstep_services.agent.rendezvous_client.status import AgentStatus, RendezvousPort
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.replicas.node_states import NodeStates
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.background import BackgroundLoops, unharmed
from everstep_services.agent.runtime.beat_sender import BeatSender
from everstep_services.agent.runtime.network_test import NetworkTestRunner
from everstep_services.agent.runtime.rank_events import RankEvents, RankObservers
from everstep_services.agent.runtime.rank_runner import RankRunner, WardenClients
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.stalls.limits_table import ExternalLimits
from everstep_services.agent.stalls.recorder import StallRecorder
from everstep_services.agent.telemetry.evidence import EvidenceCollection, EvidenceRecorder
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.first_collective import FirstCollective
from everstep_services.agent.telemetry.numerics import NumericsRecorder
from everstep_services.agent.telemetry.progress import ProgressReader
from everstep_services.agent.telemetry.saves import CoordinatedSaves
from everstep_services.agent.timings.monitor import RoundPosition, TimingMonitor
from everstep_services.agent.timings.rank_spreads import RankSpreads

if TYPE_CHECKING:
    from everstep_services.agent.injection.agent_faults import AgentFaults
    from everstep_services.agent.injection.service import FaultInjector

log = logging.getLogger(__name__)

_USERS = {signal.SIGUSR1, signal.SIGUSR2}
_LOOK_AT_BUS_EVERY_S = 0.25
_GOODBYE_WITHIN_S = 10.0
_CUT_OFF_GOODBYE_WITHIN_S = 2.0
"""Without the bus, facts wait on the disk."""
_NOBODY_WITHIN_S = 60.0
"""A new agent gives up when nobody has answered for this long; one that was answered never does."""
_UNREACHABLE = 94


class AgentService:
    """One agent, from its first `join` to its exit code.

    Every event reaches the core on the loop's thread, one at a time. The actions that the core
    returns are handed to loops that may wait.
    """

    def __init__(  # noqa: PLR0913  each is a port or what was asked for
        self,
        plan: RunPlan,
        bus: Bus,
        wardens: WardenClients,
        workdir: Workdir,
        clock: Clock,
        instance: str,
        *,
        others: ExternalLimits,
        states: NodeStates | None,
        harm: "AgentFaults | None" = None,
    ) -> None:
        self._plan = plan
        self._bus = bus
        self._workdir = workdir
        self._clock = clock
        self._instance = instance
        settings = plan.agent
        self._agent = Agent(settings)
        self._recorder = Recorder(bus, clock)
        record = self._recorder.keep
        self._records = AgentFacts(plan.job, plan.node, clock)
        self._evidence = EvidenceRecorder(plan.job, bus, self._records, record, clock, workdir)
        self._checkpoints = NodeCheckpoints(self._records, clock, record, states)
        self._rendezvous = RendezvousClient(bus, clock, plan.job, self)
        self._requests = ScriptRequests(plan, bus, clock, workdir.say)
        self._source = ranks = RankSource(
            lambda: self._agent.live_ranks, self._watched, lambda _: self._agent.order
        )
        self._stalls = StallRecorder(
            plan, bus, clock, self._records, ranks, record, workdir.say, others,
            self._agent, self._do,
        )  # fmt: skip
        self._progress = ProgressReader(
            plan, self._agent, ranks, self._records, clock, self._stalls.watch
        )
        self._saves = CoordinatedSaves(
            plan.scheduler.name, self._agent, self._watched, self._records, clock, record
        )
        self._uploader = None if not settings.store_logs else LogUploader(
            plan.job, plan.node, workdir.logs, bus.rank_logs, clock, settings.store_logs_bytes_per_s
        )  # fmt: skip
        observers = RankObservers(
            collective=FirstCollective(self._agent, self._watched, clock, self._do),
            progress=self._progress,
            evidence=self._evidence,
            collection=EvidenceCollection(
                self._evidence,
                collectors(settings.evidence_without, native_stacks=settings.native_stacks),
                workdir,
                clock,
            ),
            stalls=self._stalls,
            saves=self._saves,
            checkpoints=self._checkpoints,
            numerics=NumericsRecorder(self._records, clock),
            requests=self._requests,
            records=self._records,
            record=record,
            port=RendezvousPort(),
            logs=self._uploader,
        )
        self._ranks = RankEvents(
            RankRunner(wardens, workdir, clock), workdir, clock, self._agent, self._do, observers
        )
        self._checks = NodeChecks(
            NodeExaminer(plan.checks, notes.place(plan.state_dir, plan.node)),
            self._records, clock, self._pids, record,
        )  # fmt: skip
        self._probes = PeriodicProbes(
            plan.checks, notes.place_of_probes(plan.state_dir, plan.node), plan.node, clock,
            self._records, self._pids, record, partial(workdir.say, is_warning=True),
            lambda: self._checks.failing, self._agent, self._do,
        )  # fmt: skip
        self._beats = BeatSender(
            plan, bus, clock, self._agent, self._progress, self._probes, self._recorder,
            lambda: self._ranks.runner.warden.door, self._do,
        )  # fmt: skip
        self._measuring = NetworkTestRunner(
            plan.node, clock, self._records, record,
            plan.ranks_per_node if has_devices() else 1,
            lambda: self._do(self._agent.measured()),
        )  # fmt: skip
        self._questions = AgentStatus(
            plan, instance, self._agent, self._progress, self._checks, self._probes,
            self._checkpoints, lambda: self._measuring.figures, self._ranks.times, observers.port,
        )  # fmt: skip
        self._injection = None if harm is None else self._opened_to(harm)
        self._allocation = AllocationLink(
            settings.allocation_dir, plan.node, clock,
            leave=self._asked_to_leave, warn=partial(workdir.say, is_warning=True),
        )  # fmt: skip
        self._due, self._was_answered = asyncio.Event(), False
        self._exit: asyncio.Future[actions.ExitAgent] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Run until the agent is no longer needed, and return the exit code."""
        lasting = BackgroundLoops(partial(self._workdir.say, is_warning=True))
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop(), name=loop.__name__)
                for loop in (
                    self._hear_orders_for_ever,
                    self._ranks.hear_for_ever,
                    self._rendezvous.ask_for_ever,
                    self._ranks.start_and_stop_for_ever,
                    self._ranks.runner.signal_for_ever,
                    self._tick_for_ever,
                )
            ]
            loops += [
                tasks.create_task(lasting.run(loop), name=loop.__name__)
                for loop in (
                    self._requests.ask_for_ever,
                    self._recorder.record_for_ever,
                    self._evidence.collect_for_ever,
                    self._evidence.collect_later_for_ever,
                    self._evidence.collect_beside_for_ever,
                    self._checks.examine_for_ever,
                    self._probes.probe_for_ever,
                    self._measuring.measure_for_ever,
                    self._checkpoints.keep_for_ever,
                    self._stalls.watch.judge_for_ever,
                    self._stalls.watch.look_closer_for_ever,
                    self._stalls.follow_limits_for_ever,
                    self._follow_bus_for_ever,
                    self._beats.beat_for_ever,
                    self._beats.beat_when_hailed_for_ever,
                    self._hear_faults_for_ever,
                    self._ranks.collective.look_for_ever,
                    *self._measures_timings(),
                    *self._allocation.loops(),
                    *(() if self._uploader is None else (self._uploader.upload_for_ever,)),
                )
            ]
            exiting = await self._exit
            await self._say_goodbye(exiting)
            for loop in loops:
                loop.cancel()
        await self._allocation.write_end(exiting)
        return exiting.code

    def signalled(self, number: int) -> None:
        """A signal was sent to this process."""
        name, now = signal.Signals(number).name, self._clock.now()
        if name in self._plan.agent.preempt_signals:
            self._do(self._agent.preempted(number, name, now))
        elif number in _USERS:
            self._do([actions.SignalRanks(number)])
        else:
            self._do(self._agent.interrupted(number, name, now))

    def _asked_to_leave(self, reason: str) -> None:
        """The batch script wants this node to leave: that is a preemption."""
        self._do(self._agent.preempted(signal.SIGTERM, reason, self._clock.now()))

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
            # Join only once orders can be heard: a node that does not hear them counts as lost.
            self._do(self._agent.begin())

    async def _hear(self, inbox: Inbox[Order]) -> None:
        while True:
            order = await inbox.get()
            kind = type(order).__name__
            log.info("order type=%s round=%d reason=%s", kind, order.round, order.reason)
            with unharmed(f"order {kind}"):
                is_accused = isinstance(order, StopRanks) and self._is_accused(order)
                if isinstance(order, StopRanks) and is_accused:
                    self._probes.round_ended(order.check)
                if isinstance(order, SaveCheckpoint):
                    self._do(self._agent.asked_to_save(order, self._clock.now()))
                else:
                    self._do(self._agent.ordered(order, is_accused=is_accused))

    def _is_accused(self, order: StopRanks) -> bool:
        """A node is unfit only for a failure that was compared; older releases name no check."""
        is_named = not order.check or self._plan.node in order.accused
        return order.cause == "check_failed" and is_named

    def joined(self, reply: Joined) -> None:
        self._was_answered = True
        self._allocation.exclusion = reply.reason if reply.cause == "excluded" else ""
        self._do(self._agent.joined(reply, self._clock.now()))

    def reported(self, tell: actions.SendReport, reply: Reported) -> None:
        if tell.rank is not None and reply.incident is not None and tell.event != "excused":
            self._evidence.belongs_to(tell.round, tell.rank, reply.incident)
        self._do(self._agent.reported(tell, reply, self._clock.now()))

    def refused(self, reason: str) -> None:
        self._do(self._agent.give_up(1, reason))

    def unanswered(self, for_s: float, reason: str) -> None:
        log.info("rendezvous_silent for_s=%.1f error=%s", for_s, reason)
        self._do(self._agent.unheard(self._clock.now(), reason))
        if not self._was_answered and for_s > _NOBODY_WITHIN_S:
            text = f"rendezvous has not answered for {for_s:.0f} s: {reason}"
            self._do(self._agent.give_up(_UNREACHABLE, text))

    # -- the ranks --------------------------------------------------------------------------------

    def _pids(self) -> Collection[int]:
        return self._source.pids(self._agent.live_ranks).values()

    def _watched(self, rank: int) -> WatchedRank | None:
        return self._ranks.runner.warden.watch.rank(rank)

    def _place(self) -> RoundPosition | None:
        order = self._agent.order
        if order is None or not self._agent.live_ranks:
            return None
        ranks = range(order.first_rank, order.first_rank + order.ranks)
        return RoundPosition(order.round, order.slot, order.slots, order.world_size, ranks)

    def _measures_timings(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        plan = self._plan
        if not plan.agent.timings:
            return ()
        role = "" if plan.role == "default" else plan.role
        timings = TimingMonitor(
            plan.job, plan.node, self._bus, self._clock, self._place, self._watched, role
        )
        spreads = RankSpreads(plan.job, self._bus, self._clock, lambda: self._source.folder(0))
        return (timings.tell_for_ever, spreads.tell_for_ever)

    # -- faults on purpose -----------------------------------------------------------------------

    def _opened_to(self, harm: "AgentFaults") -> "FaultInjector":
        from everstep_services.agent.injection.service import FaultInjector

        say = self._workdir.say
        return FaultInjector(self._plan, self._bus, harm, self._agent, self._source, say)

    async def _hear_faults_for_ever(self) -> None:
        if self._injection is not None:
            await self._injection.hear_for_ever(self._instance)

    # -- time and the bus ------------------------------------------------------------------------

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
        """Notice that the bus was away: messages of that time are not repeated."""
        was_away, returns = False, self._bus.returns
        while True:
            await self._clock.sleep(_LOOK_AT_BUS_EVERY_S)
            if not self._bus.connected:
                self._do(self._agent.unheard(self._clock.now(), "the bus is away"))
                if not was_away:
                    run_on = ": the ranks run on" if self._agent.live_ranks else ""
                    self._workdir.say(f"the bus is away{run_on}", is_warning=True)
                was_away = True
            elif was_away or self._bus.returns != returns:
                was_away, returns = False, self._bus.returns
                self._workdir.say("the bus is back")
                self._do(self._agent.bus_back())

    # -- actions ---------------------------------------------------------------------------------

    def _do(self, wanted: Sequence[actions.Action]) -> None:
        for act in wanted:
            match act:
                case actions.AskToJoin():
                    self._rendezvous.join(self._questions.join)
                case actions.SendReport():
                    self._tell(act)
                case (
                    StartRanks()
                    | SaveParked()
                    | actions.StopRound()
                    | actions.StopWithoutWait()
                    | actions.SignalRanks()
                    | actions.EndParked()
                ):
                    self._change_ranks(act)
                case actions.ShowLine():
                    self._workdir.say(act.text, is_warning=act.is_warning)
                case actions.ExitAgent():
                    self._exiting(act)
                case Order():
                    self._answer(act)
                case _:
                    self._save(act)
        self._due.set()

    def _change_ranks(self, act: actions.RankAction) -> None:
        if isinstance(act, StartRanks):
            self._measuring.give_way()
        self._ranks.runner.do(act)
        # Beat before the report: a node that is lost in its first second of a round would otherwise
        # be looked for in a round that is over.
        with unharmed("a beat"):
            self._beats.send()

    def _save(self, act: actions.SaveAction) -> None:
        match act:
            case actions.PassNotice():
                if (signalled := self._saves.passed_on(act)) is not None:
                    self._ranks.runner.do(signalled)
            case actions.AskRanksToStop():
                reached = self._saves.counts_now(act)
                if reached is not None:
                    self._tell(reached)
                if reached is not None or not self._saves.ask_to_stop(act):
                    self._do(self._agent.unasked(act.after_step, self._clock.now()))
            case actions.AskRanksToSave():
                self._saves.ask_to_save(act)
            case actions.ReportProgress():
                self._tell(self._saves.reached(act))
            case _:
                self._saves.put_on_record(act)

    def _answer(self, order: actions.OrderedAction) -> None:
        match order:
            case RunChecks() if order.occasion == "compare":
                self._probes.compare(order)
            case RunChecks():
                self._checks.ask(order)
            case CopyReplica() | ReleaseImages():
                self._checkpoints.ask(order)
            case MeasureNetwork():
                self._measuring.ask(order)
            case CollectEvidence():
                with unharmed("a capture"):
                    self._ranks.capture(order)
            case NameExcuse():
                if (told := self._stalls.excuse(order)) is not None:
                    self._tell(told)

    def _tell(self, tell: actions.SendReport) -> None:
        order = self._agent.order
        fact = tell.fact
        if fact is None and tell.rank is not None:
            fact = self._evidence.fact_of(tell.round, tell.rank)
        slot = 0 if order is None else order.slot  # a spare has no slot
        self._rendezvous.tell(tell, self._questions.report(tell, slot, fact))

    def _exiting(self, exiting: actions.ExitAgent) -> None:
        if self._plan.scheduler.name == "kubernetes" and exiting.cause == "excluded":
            # After 0 Kubernetes would count this pod as done, and not replace it.
            exiting = replace(exiting, code=exiting.code or SAVED)
        if not self._exit.done():
            self._exit.set_result(exiting)

    async def _say_goodbye(self, exiting: actions.ExitAgent) -> None:
        await self._requests.finish()
        if exiting.code or exiting.cause in {"refused", "excluded"}:
            self._workdir.say(exiting.reason, is_warning=bool(exiting.code))
        with unharmed("the last beat"):
            self._beats.send()
        await self._workdir.drain()
        within_s = _GOODBYE_WITHIN_S if self._bus.connected else _CUT_OFF_GOODBYE_WITHIN_S
        await self._evidence.finish(within_s)
        if self._uploader is not None:
            with unharmed("the output of ranks"):
                await self._uploader.finish(within_s)
        if exiting.has_seat or not exiting.is_sent:
            await self._rendezvous.leave(self._questions.leave(exiting), within_s)
        try:
            async with asyncio.timeout(within_s):
                await self._recorder.all_kept()
                await self._bus.flush(within_s)
        except (BusError, TimeoutError) as error:
            lost = self._recorder.waiting  # as if no disk had taken any of them
            log.info("facts_wait_in_the_spool lost=%d error=%s", lost, error)
