"""Reads the events of the ranks of this node, and passes them to the parts that they concern.

The head of this package shows the way of an event. A failure of a part that only records and
watches is logged, and the core hears of each event anyway.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import asdict

from everstep.clock import Clock
from everstep.messages import (
    CollectEvidence,
    Fact,
    NumericsActed,
    RanksStopped,
    SaveParked,
    StartRanks,
    StateHealed,
)
from everstep.messages.facts.numerics import told_act
from everstep_services.agent.core import actions
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.output.log_upload import LogUploader
from everstep_services.agent.ranks.device_memory import HeldMemory
from everstep_services.agent.ranks.protocol import (
    RankGone,
    RankRuns,
    RankSaid,
    ScriptEnded,
    WardenEvent,
    WardenLost,
)
from everstep_services.agent.rendezvous_client.script_requests import ScriptRequests
from everstep_services.agent.rendezvous_client.status import RendezvousPort, StartStopTimes
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.runtime.background import unharmed
from everstep_services.agent.runtime.rank_runner import RankRunner
from everstep_services.agent.runtime.urgent_work import begin_urgent_work, end_urgent_work
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.stalls.recorder import StallRecorder
from everstep_services.agent.telemetry.evidence import EvidenceCollection, EvidenceRecorder
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.first_collective import FirstCollective
from everstep_services.agent.telemetry.numerics import NumericsRecorder, steps_back
from everstep_services.agent.telemetry.progress import ProgressReader
from everstep_services.agent.telemetry.saves import CoordinatedSaves
from trainer_sdk.wire import (
    AllStopped,
    Checkpointed,
    ForgeDown,
    ForgeUp,
    Injected,
    NumericsReported,
    RankHealed,
    Requested,
    Restarted,
    StartFailed,
    Stepped,
    StopSeen,
)

log = logging.getLogger(__name__)

_FIRST_STEP_S = 0.3
"""What services leave to ranks that begin: a group of eight forms in less on two processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservers:
    """The parts of the agent that follow its ranks; none of them decides."""

    progress: ProgressReader
    evidence: EvidenceRecorder
    collection: EvidenceCollection
    stalls: StallRecorder
    collective: FirstCollective
    saves: CoordinatedSaves
    checkpoints: NodeCheckpoints
    numerics: NumericsRecorder
    requests: ScriptRequests
    records: AgentFacts
    record: Callable[[Fact], None]
    port: RendezvousPort
    logs: LogUploader | None = None
    """Sends the output of ranks, where that was chosen."""


class RankEvents:
    """Reads the events of ranks and tells the agent's core and its recording parts.

    The core hears of every event, whatever happens to the parts that only watch and record.
    """

    def __init__(
        self,
        runner: RankRunner,
        workdir: Workdir,
        clock: Clock,
        agent: Agent,
        do: Callable[[Sequence[actions.Action]], None],
        observers: RankObservers,
    ) -> None:
        self.runner = runner
        self._workdir = workdir
        self._leaves_children = workdir.leaves_children
        self._clock = clock
        self._agent = agent
        self._do = do
        self._observers = observers
        self.times = StartStopTimes()
        self._leaving: dict[tuple[int, int], RankExit] = {}
        """Round and rank of scripts that have asked to exit, and whose processes have not exited
        yet."""
        self._left_out: set[str] = set()
        """Modules already reported as imported by each rank for itself."""
        self._unfit = ""
        """Why the forge cannot fork, until that was shown."""

    @property
    def collective(self) -> FirstCollective:
        """Looks for the first collective of a round."""
        return self._observers.collective

    async def hear_for_ever(self) -> None:
        """Read the events of the warden for ever."""
        async for event in self.runner.events():
            order = self._agent.order
            match event:
                case ForgeUp() | ForgeDown():
                    self._forge_is(event)
                case WardenLost():
                    self._warden_lost(event)
                case _ if order is None or event.round != order.round:
                    log.info("late_event event=%s", event)
                case _:
                    await self._rank_did(order, event)

    # -- the warden ------------------------------------------------------------------------------

    def _forge_is(self, event: ForgeUp | ForgeDown) -> None:
        self.times.is_warm = isinstance(event, ForgeUp)
        if isinstance(event, ForgeUp):
            log.info("forge_ready took_s=%.2f preloaded=%s", event.took_s, event.preloaded)
            self._unfit = ""
            for reason in event.left_out:
                if reason not in self._left_out:
                    self._left_out.add(reason)
                    self._workdir.say(f"left to each rank: {reason}")
        else:
            self._unfit = event.reason
            log.info("forge_unfit final=%s reason=%s", event.final, event.reason)

    def _warden_lost(self, event: WardenLost) -> None:
        order = self._agent.order
        self.times.is_warm = False
        self._workdir.say(event.reason, is_warning=True)
        if order is not None:
            for rank in range(order.first_rank, order.first_rank + order.ranks):
                if self._observers.evidence.fact_of(order.round, rank) is None:
                    ending = RankExit(why_unseen=event.reason)
                    self._keep_end(order, rank, 0, ending)
                    self._fails(order.round, rank, ending, self._agent.rank_gone)

    # -- a rank ----------------------------------------------------------------------------------

    async def _rank_did(self, order: StartRanks, event: WardenEvent) -> None:
        match event:
            case StartFailed():
                self._do(self._agent.start_failed(event.round, event.reason))
            case RankRuns():
                self._runs(order, event)
            case Stepped():
                self._stepped(order, event)
            case RankSaid():
                self._said(order, event)
            case ScriptEnded():
                await self._script_ended(order, event)
            case RankGone():
                await self._gone(order, event)
            case _:
                pass

    def _runs(self, order: StartRanks, event: RankRuns) -> None:
        observers = self._observers
        with unharmed("the progress of a rank that runs"):
            if told := observers.progress.runs(event):
                self._workdir.say(told)
        asyncio.get_running_loop().call_later(_FIRST_STEP_S, end_urgent_work)
        self._do(self._agent.rank_runs(event.rank))
        if event.start == "cold" and self._unfit:
            self._workdir.say(f"ranks start cold: {self._unfit}", is_warning=True)
            self._unfit = ""
        with unharmed("the record of a start"):
            observers.evidence.rank_runs(order, event.rank, event.pid)
            cpus = self._workdir.cpus(event.rank - order.first_rank)
            logs = self._workdir.logs.folder(event.round, event.rank)
            observers.record(observers.records.rank_started(order, event, log=logs, cpus=cpus))

    def _stepped(self, order: StartRanks, event: Stepped) -> None:
        observers = self._observers
        end_urgent_work()
        with unharmed("the record of a first step"):
            first = observers.progress.stepped(order, event.rank, event.step)
            if first is not None:
                observers.record(first)
                if again := observers.progress.steps_again(order, event.rank, event.step):
                    self._workdir.say(again, is_warning=True)
        with unharmed("the limits of a first step"):
            observers.stalls.stepped(event.rank)
        self._do(self._agent.rank_stepped(event.rank, event.step))

    def _said(self, order: StartRanks, event: RankSaid) -> None:
        if isinstance(event.message, StopSeen):
            now = self._clock.now()
            self._do(self._agent.rank_stops(event.rank, event.message.step, now))
            return
        with unharmed("what a rank said"):
            self._heard(order, event)

    def _heard(self, order: StartRanks, event: RankSaid) -> None:
        observers = self._observers
        match event.message:
            case Injected() as message:
                fault = observers.records.injected(order, event.rank, message)
                self._agent.injected(fault)
                observers.record(fault)
            case Restarted() | NumericsReported() | RankHealed() as message:
                self._reported(self._facts_of(order, event.rank, message))
            case Requested() as message:
                observers.requests.hear(message)
            case Checkpointed() as message:
                observers.checkpoints.said(message)
            case _:
                observers.stalls.said(event)

    def _reported(self, facts: Sequence[Fact]) -> None:
        observers = self._observers
        observers.progress.went_back(steps_back(facts))
        for fact in facts:
            observers.record(fact)
            if isinstance(fact, NumericsActed) and fact.outcome == "refused":
                self._workdir.say(told_act(asdict(fact), ""), is_warning=True)
            elif isinstance(fact, StateHealed) and not fact.rank:
                observers.checkpoints.all_healed(fact)
                self._workdir.say(fact.sentence)

    def _facts_of(
        self, order: StartRanks, rank: int, message: Restarted | NumericsReported | RankHealed
    ) -> Sequence[Fact]:
        observers = self._observers
        if isinstance(message, RankHealed):
            return (observers.records.healed(order, message),)
        if isinstance(message, NumericsReported):
            return observers.numerics.heard(order.round, message)
        if message.is_without:
            return ()  # this agent starts all ranks again
        return observers.records.restarted(order, rank, message, observers.progress.step(rank))

    async def _script_ended(self, order: StartRanks, event: ScriptEnded) -> None:
        """Not every failure counts yet: a script may exit with any code, and take its time."""
        if event.code:
            begin_urgent_work()
        with unharmed("the last look for stalls"):
            self._observers.stalls.watch.look()
        if not event.code:
            self._do(self._agent.script_returned(event.rank, self._clock.now()))
            return
        error = await self.runner.warden.error(event.rank)
        if (
            error is None or error.name == "SystemExit"
        ):  # also for an exit that could not be recorded
            if not event.was_told:
                asked = RankExit(code=event.code, error=error)
                self._leaving[event.round, event.rank] = asked
            return
        # A rank that raised before the order to end may be the cause, even if others were heard
        # first: its process may hang as it exits, and then nothing else reports it.
        if event.was_told or not self._is_ours(event.round):
            return
        page = self.runner.warden.page(event.rank)
        lasted_s = self._clock.now() - page.script_s if page is not None else 0.0
        ending = RankExit(code=event.code, error=error, lasted_s=lasted_s)
        pid = 0 if page is None else page.pid
        self._keep_end(order, event.rank, pid, ending)
        self._fails(event.round, event.rank, ending, self._agent.script_failed)

    async def _gone(self, order: StartRanks, event: RankGone) -> None:
        if event.code or event.signal:
            begin_urgent_work()
        # A signal leaves no exception. Of two ranks, the killed one is reported before the other.
        error = await self.runner.warden.error(event.rank) if event.code else None
        asked = self._leaving.pop((event.round, event.rank), None)
        if (event.was_told and asked is None) or not self._is_ours(event.round):
            return
        observers = self._observers
        stopped_after = observers.saves.has_seen(event.rank)
        if stopped_after is not None:
            self._do(self._agent.rank_stops(event.rank, stopped_after, self._clock.now()))
        ending = RankExit(
            event.code,
            event.signal,
            event.core_dumped,
            error,
            memory=event.memory,
            lasted_s=event.lasted_s,
        )
        if event.was_told and asked is not None:  # the order to stop came afterwards
            ending = replace(asked, lasted_s=event.lasted_s)
        if observers.evidence.fact_of(order.round, event.rank) is None:
            self._keep_end(order, event.rank, event.pid, ending)
        self._fails(event.round, event.rank, ending, self._agent.rank_gone)

    def _fails(
        self,
        round: int,
        rank: int,
        ending: RankExit,
        at_work: Callable[[int, RankExit], list[actions.Action]],
    ) -> None:
        """A rank failed by itself; meanwhile its round may have been stopped."""
        fails = at_work if self._is_at_work(round) else self._agent.rank_fell
        self._do(fails(rank, ending))

    def _keep_end(self, order: StartRanks, rank: int, pid: int, ending: RankExit) -> None:
        with unharmed("the record of an end"):
            step = self._observers.progress.step(rank)
            self._observers.evidence.rank_exited(order, rank, pid, ending, step)

    def _is_at_work(self, round: int) -> bool:
        """The ranks of this round run here, and were not ordered to stop."""
        return self._is_ours(round) and self._agent.state != "stopping"

    def _is_ours(self, round: int) -> bool:
        return self._agent.order is not None and self._agent.order.round == round

    # -- all ranks of a round --------------------------------------------------------------------

    async def start_and_stop_for_ever(self) -> None:
        """Carry out the orders about rounds, one after the other."""
        while True:
            match await self.runner.next_round():
                case StartRanks() as order:
                    await self._observers.collection.of_kept()
                    if self.round_begins(order):
                        reason = await self.runner.start(order)
                        if reason:
                            self._do(self._agent.start_failed(order.round, reason))
                        else:
                            self.round_started(order)
                case actions.StopRound() as stop:
                    began = self._clock.now()
                    await self.round_stops(stop)
                    left_s = began + stop.wait_s - self._clock.now()
                    waited_s = await self.runner.wait_for_ends(left_s)
                    outcome, held = await self.runner.stop(stop, waited_s)
                    self.round_stopped(stop, outcome, held)
                    self._workdir.hide()
                case SaveParked() as order:
                    self._observers.port.release(order)
                    await self.runner.save_parked(order)
                    self._do(self._agent.saved())
                case actions.EndParked() as act:
                    await self.runner.end_parked(act)

    def round_begins(self, order: StartRanks) -> bool:
        """The ranks are about to be started; False when they are no longer wanted."""
        if not self._agent.wants(order):
            return False
        for observer in (
            self._observers.progress,
            self._observers.stalls,
            self._observers.checkpoints,
            self._observers.collective,
        ):
            with unharmed("the begin of a round"):
                observer.begins(order)
        self._observers.port.release(order)
        begin_urgent_work()
        return True

    def round_started(self, order: StartRanks) -> None:
        """The files of their output exist."""
        if self._observers.logs is not None:
            with unharmed("the output of a round"):
                self._observers.logs.begins(order)

    async def round_stops(self, stop: actions.StopRound) -> None:
        """Collect evidence, within the limit of the order: every restart waits for it."""
        self.times.evidence_s = 0.0
        if stop.incident is None:
            return
        with unharmed("the logs of ranks that are stopped"):
            self._observers.evidence.round_stops(stop.round, stop.incident)
        if not stop.evidence_s:
            return
        began = self._clock.now()
        with unharmed("the evidence of ranks that are stopped"):
            order, watch = self._agent.order, self.runner.warden.watch
            await self._observers.collection.before_stop(stop, stop.incident, order, watch)
        self.times.evidence_s = self._clock.now() - began

    def capture(self, wanted: CollectEvidence) -> None:
        """Collect from ranks that continue to run; an unknown kind is reported as missing."""
        order = self._agent.order
        if order is not None and order.round == wanted.round:
            self._observers.collection.capture(wanted, order, self.runner.warden.watch)

    def round_stopped(self, stop: actions.StopRound, outcome: AllStopped, held: HeldMemory) -> None:
        """No rank is left, but those that are parked."""
        observers, order = self._observers, self._agent.order
        assert order is not None
        self.times.stop_s = outcome.stop_s
        last: list[Fact] = []
        with unharmed("the end of a round"):
            last += observers.progress.ends()
            observers.stalls.ends()
            observers.checkpoints.ends()
            last += observers.numerics.ends(incident=stop.incident)
        if observers.logs is not None:
            with unharmed("the output of a round"):
                observers.logs.ends()
        self._workdir.say_outlived(outcome.outlived, live_on=self._leaves_children)
        self._do(self._agent.stopped(stop.round, parked=len(outcome.kept)))
        with unharmed("the record of ranks that were stopped"):
            if outcome.ranks:
                stopped = RanksStopped(
                    **observers.records.of_round(order.round), node=observers.records.node,
                    slot=order.slot, ranks=outcome.ranks, killed=outcome.killed,
                    stop_s=outcome.stop_s, evidence_s=self.times.evidence_s,
                    device_wait_s=round(held.wait_s, 3), device_held_bytes=held.octets,
                    held_by=held.by,
                )  # fmt: skip
                last.append(stopped)
            if stop.incident is not None:
                observers.evidence.round_stopped(
                    order, stop.incident, outcome.ranks, observers.stalls.suspect
                )
                watch = self.runner.warden.watch
                observers.collection.after_stop(stop, stop.incident, order, watch)
            for fact in last:
                observers.record(fact)
