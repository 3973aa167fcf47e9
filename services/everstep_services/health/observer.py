"""Hears every beat, has the domain judge it, and records the findings."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from everstep import subjects
from everstep.bus.derived_ids import DerivedIds
from everstep.bus.errors import BusTimeoutError
from everstep.bus.facts.recorder import Recorder
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    BeatNow,
    JobEnded,
    NodeBeat,
    NodeLost,
    NodeReturned,
    ObserverBlinded,
    RankRecovered,
    RankStalled,
    StallLocated,
)
from everstep.messages.facts.stamp import FactHead
from everstep_services.health.domain.findings import Finding, NodeLoss, NodeReturn
from everstep_services.health.domain.fleet import Fleet
from everstep_services.health.domain.stalls import StallFinding, StallLocator
from everstep_services.health.learned_limits import LearnedLimits
from everstep_services.health.settings import HealthSettings

log = logging.getLogger(__name__)


class ReadLag:
    """Sends a marker to itself at each tick. The server keeps the order of what it sends.

    It does not wait for one marker before it sends the next: a marker that took long tells nothing
    about the messages that were sent after it.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._name = new_id()[12:24]
        self._is_subscribed = False
        self._read_at: float | None = None
        self._markers: dict[str, float] = {}
        """When each marker that has not come back was sent, by its id."""

    async def hear_for_ever(self) -> None:
        """Take in the markers that come back."""
        subject = subjects.hail(subjects.CLUSTER, self._name)
        async with self._bus.subscribe(subject, BeatNow) as markers:
            self._is_subscribed = True
            async for marker in markers:
                if marker.id in self._markers:
                    self._returned(marker.id)

    def read_at(self, now: float) -> float:
        """The time before which every message was read. Call it at each tick: it sends a marker."""
        if not self._is_subscribed:
            return now
        if self._read_at is None:
            self._read_at = now
        self._send(now)
        return self._read_at

    def forget(self) -> None:
        """Forget the markers that were under way: the bus was away, and has lost them."""
        self._markers.clear()

    def _send(self, now: float) -> None:
        marker = BeatNow(
            id=new_id(), job=subjects.CLUSTER, round=0, node=self._name, reason="read marker"
        )
        self._markers[marker.id] = now
        self._bus.send(subjects.hail(subjects.CLUSTER, self._name), marker)

    def _returned(self, marker: str) -> None:
        for id_ in list(self._markers):  # the markers before it were lost, as any message may be
            self._read_at = self._markers.pop(id_)
            if id_ == marker:
                return


class WriteProof:
    """Proves by writes that the servers of the bus are reached, most of them and each other one.

    The nodes behind a server that is not reached are silent, and nobody may judge them.
    """

    def __init__(self, bus: Bus, clock: Clock, come_back: Callable[[], None]) -> None:
        """`come_back` is called when servers that were not reached are reached again."""
        self._bus = bus
        self._clock = clock
        self._come_back = come_back
        self._proven_at: float | None = None
        self._needed_at = 0.0
        self._is_writing = self._has_failed = False
        self._is_needed = asyncio.Event()

    def proven_at(self, now: float, *, is_needed: bool) -> float:
        """The time of the newest write that was acknowledged; `now` while nobody is silent.

        Once a proof was needed, only a later write ends the need.
        """
        if not self._is_writing:
            return now
        if is_needed:
            self._needed_at = now
            self._is_needed.set()
            if self._proven_at is None:
                self._proven_at = now
        elif self._proven_at is None or self._proven_at > self._needed_at:
            self._proven_at = None
            self._is_needed.clear()
        return now if self._proven_at is None else self._proven_at

    async def write_for_ever(self) -> None:
        """Write while a proof is needed."""
        self._is_writing = True
        while True:
            await self._is_needed.wait()
            begun = self._clock.now()
            try:
                await self._bus.prove_servers()
            except (EverstepError, TimeoutError) as error:
                log.info("nothing_proven error=%s", error)
                self._has_failed = True
            else:
                if self._has_failed:
                    self._has_failed = False
                    self._come_back()
                if self._proven_at is not None:
                    self._proven_at = max(self._proven_at, begun)
            await self._clock.sleep(_PROVE_EVERY_S)


_SOURCE = "health"
_PROVE_EVERY_S = 0.1
_REMIND_EVERY_S = 1.0
_PROBE_WITHIN_S = 5.0


class HealthObserver:
    """One of any number of replicas: all hear the same beats and make the same facts.

    It stores nothing. A new replica knows a node from its first beat on.
    """

    def __init__(
        self,
        settings: HealthSettings,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        limits: LearnedLimits,
        ids: DerivedIds,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._records = records
        self._ids = ids
        self._limits = limits
        self._fleet = Fleet(settings)
        self._locator = StallLocator(settings.forget_after_s)
        self.read_lag = ReadLag(bus)
        self.write_proof = WriteProof(bus, clock, self._fleet.come_back)
        self._hails = 0
        self._is_listening = False
        self._reported_blind_s = 0.0
        self._blinded_by = ""
        self._heard = 0
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the observer")

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        jobs, nodes, lost = self._fleet.counts()
        names = ("hails", "knocks", "inquiries", "lost", "returned", "stalls")
        return {
            "beats_total": float(self._heard),
            "jobs": float(jobs),
            "nodes": float(nodes),
            "nodes_lost": float(lost),
            "blind_seconds_total": self._fleet.blind_s,
            "input_failures_total": float(self._input_failures.failures),
            **{f"{name}_total": float(self._counts[name]) for name in names},
        }

    def silences(self, job: str | None) -> dict[str, tuple[float, bool]]:
        """How long each node of a job, or of all, is silent, and whether it is lost."""
        return self._fleet.silences(job, self._clock.now())

    def has_heard(self, job: str) -> bool:
        """Whether health has heard a node of the job, and has not forgotten it."""
        return bool(self._fleet.silences(job, self._clock.now()))

    def nodes(self) -> int:
        """The number of nodes that health has heard and not forgotten."""
        _, heard, lost = self._fleet.counts()
        return heard + lost

    async def hear_for_ever(self) -> None:
        """Take in every beat of every job as it arrives: beats that waited would be costly."""
        async with self._bus.subscribe(subjects.beat(), NodeBeat) as beats:
            self._is_listening = True
            beats.take_at_once(self._hear)
            await asyncio.Event().wait()

    def _hear(self, beat: NodeBeat) -> None:
        self._heard += 1
        try:
            now = self._clock.now()
            finding = self._fleet.hear(beat, now)
            self._locator.hear(beat, self._fleet.seen_s(now))
            self._limits.hear(beat)
            if finding is not None:
                self._announce_return(finding)
        except Exception as error:  # noqa: BLE001  a beat must not end the service
            self._input_failures.note("a beat", error)

    async def follow_jobs_for_ever(self) -> None:
        """Follow which jobs are over: their nodes are not lost when they fall silent."""
        async with self._bus.subscribe(subjects.fact(None, "job_ended"), JobEnded) as ended:
            async for fact in ended:
                with self._input_failures.caught("the end of a job"):
                    self._fleet.end_job(fact.job)
                    self._locator.end_job(fact.job)
                    self._limits.end_job(fact.job)

    async def follow_stalls_for_ever(self) -> None:
        """Follow which ranks have stalled, as their agents report."""
        subject = subjects.fact(None, "rank_stalled")
        async with self._bus.subscribe(subject, RankStalled) as stalls:
            async for fact in stalls:
                with self._input_failures.caught("a stall"):
                    self._locator.stalled(fact, self._fleet.seen_s(self._clock.now()))

    async def follow_recoveries_for_ever(self) -> None:
        """Follow which stalled ranks move again."""
        subject = subjects.fact(None, "rank_recovered")
        async with self._bus.subscribe(subject, RankRecovered) as recoveries:
            async for fact in recoveries:
                with self._input_failures.caught("a recovery"):
                    self._locator.recovered(fact)

    async def remind_for_ever(self) -> None:
        """Report lost nodes again: rendezvous may have been away, or have heard the node since."""
        while True:
            await self._clock.sleep(_REMIND_EVERY_S)
            for finding in self._fleet.still_lost():
                with self._input_failures.caught("a reminder"):
                    self._send_loss(self._loss(finding))

    async def judge_for_ever(self) -> None:
        """Judge every silence and every stall, once a tick."""
        await self._ids.known()
        async with asyncio.TaskGroup() as probes:
            while True:
                await self._clock.sleep(self._fleet.tick_s)
                with self._input_failures.caught("a judgement"):
                    self._judge(probes)

    def _judge(self, probes: asyncio.TaskGroup) -> None:
        now, is_blind = self._clock.now(), self._is_blind()
        read_at = now if is_blind else self.read_lag.read_at(now)
        proven_at = self.write_proof.proven_at(now, is_needed=self._hails > 0 and not is_blind)
        is_cut_off, read_at = proven_at < read_at, min(read_at, proven_at)
        for loss in self._fleet.judge(now, is_blind=is_blind, read_at=read_at):
            self._announce_loss(loss)
        if self._fleet.is_behind:
            self._blinded_by = (
                "the bus acknowledged no write"
                if is_cut_off
                else "beats came faster than they could be read"
            )
        hails = self._fleet.hails(now)
        self._hails = len(hails)
        self._counts["hails"] += self._hails
        for beat in hails:
            self._bus.send(subjects.hail(beat.job, beat.node), _hail(beat))
        for asked, silent in self._fleet.inquiries(now):
            self._counts["inquiries"] += 1
            self._bus.send(subjects.hail(asked.job, asked.node), _inquiry(asked, silent))
        for beat in self._fleet.probes(now):
            probes.create_task(self._probe(beat), name=f"probe-{beat.node}")
        if not is_blind:
            seen_s = self._fleet.seen_s(now)
            for stall in self._locator.judge(seen_s, self._fleet.back_s):
                self._announce_stall(stall)
            self._announce_blindness()
        self._limits.forget(self._settings.forget_after_s)

    async def _probe(self, beat: NodeBeat) -> None:
        """Find out whether the node still has a subscriber; a probe that fails has no result."""
        self._counts["knocks"] += 1  # the metric has kept its first name
        is_there: bool | None
        try:
            subject = subjects.hail(beat.job, beat.node)
            is_there = await self._bus.deliver(subject, _hail(beat), within_s=_PROBE_WITHIN_S)
        except BusTimeoutError:
            is_there = None
        except EverstepError as error:
            log.debug("probe_failed job=%s node=%s error=%s", beat.job, beat.node, error)
            return
        with self._input_failures.caught("a probe"):
            self._fleet.probed(beat, is_there, self._clock.now())

    def _is_blind(self) -> bool:
        if self._is_listening and self._bus.connected:
            return False
        self._blinded_by = "the bus was away"
        self.read_lag.forget()
        return True

    def _announce_loss(self, finding: NodeLoss) -> None:
        beat = finding.beat
        log.warning("node_lost job=%s node=%s reason=%r", beat.job, beat.node, finding.reason)
        self._counts["lost"] += 1
        fact = self._loss(finding)
        self._records.keep(fact)
        if not finding.is_replaced:  # else rendezvous knows
            self._send_loss(fact)

    def _send_loss(self, fact: NodeLost) -> None:
        self._bus.send(subjects.lost(fact.job, fact.node), fact)

    def _loss(self, finding: NodeLoss) -> NodeLost:
        return NodeLost(
            **self._head(finding),
            round=finding.beat.round,
            node=finding.beat.node,
            reason=finding.reason,
            silence_s=round(finding.silence_s, 3),
            limit_s=finding.limit_s,
            blind_s=round(finding.blind_s, 3),
            slot=finding.beat.slot,
            last_step=finding.last_step,
            is_replaced=finding.is_replaced,
            overload=finding.overload,
            is_warden_alive=finding.is_warden_alive,
        )

    def _announce_return(self, finding: NodeReturn) -> None:
        beat = finding.beat
        log.info("node_returned job=%s node=%s reason=%r", beat.job, beat.node, finding.reason)
        self._counts["returned"] += 1
        self._records.keep(
            NodeReturned(
                **self._head(finding),
                round=beat.round,
                node=beat.node,
                reason=finding.reason,
                away_s=round(finding.away_s, 3),
                loss=self._ids.of(finding.loss),
                how=finding.how,
                lost_round=finding.lost_round,
            )
        )

    def _announce_stall(self, stall: StallFinding) -> None:
        log.warning("stall_located job=%s round=%d reason=%r", stall.job, stall.round, stall.reason)
        self._counts["stalls"] += 1
        fact = StallLocated(
            id=self._ids.of(stall.id),
            job=stall.job,
            at=self._clock.wall(),
            source=_SOURCE,
            round=stall.round,
            first_ranks=stall.first_ranks,
            nodes=stall.nodes,
            waiting_ranks=stall.waiting_ranks,
            section=stall.section,
            lead_s=stall.lead_s,
            is_certain=stall.is_certain,
            reason=stall.reason,
        )
        self._records.keep(fact)
        if stall.nodes:
            self._bus.send(subjects.lost(stall.job, stall.nodes[0]), fact)

    def _announce_blindness(self) -> None:
        """Record a blindness that is over, if it was long enough to hide the loss of a node."""
        blind_s = self._fleet.blind_s - self._reported_blind_s
        self._reported_blind_s = self._fleet.blind_s
        reason = self._blinded_by or "this process got no turn"
        self._blinded_by = ""
        if blind_s < self._settings.silence_limit_s:
            return
        log.warning("observer_blinded blind_s=%.1f reason=%r", blind_s, reason)
        self._records.keep(
            ObserverBlinded(
                id=new_id(),
                job=subjects.CLUSTER,
                at=self._clock.wall(),
                source=_SOURCE,
                blind_s=round(blind_s, 3),
                reason=reason,
            )
        )

    def _head(self, finding: Finding) -> FactHead:
        return {
            "id": self._ids.of(finding.id),
            "job": finding.beat.job,
            "at": self._clock.wall(),
            "source": _SOURCE,
        }


def _hail(beat: NodeBeat) -> BeatNow:
    reason = f"health does not hear {beat.node}"
    return BeatNow(id=new_id(), job=beat.job, round=beat.round or 0, node=beat.node, reason=reason)


def _inquiry(asked: NodeBeat, silent: Sequence[NodeBeat]) -> BeatNow:
    names = ", ".join(beat.node for beat in silent)
    return BeatNow(
        id=new_id(),
        job=asked.job,
        round=asked.round or 0,
        node=asked.node,
        reason=f"do the wardens of {names} live?",
        wardens=tuple(beat.warden for beat in silent if beat.warden is not None),
    )
