"""Evidence on its way into the store: the ends of logs, and the findings of collectors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from everstep.bus.errors import BusConfigError, BusError, BusRefusedError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import BlobRef, CollectEvidence, EvidenceCollected, Fact, StartRanks
from everstep_services.agent.collectors.collection import Collector, Piece, Scene, collect
from everstep_services.agent.collectors.flight_recorder import left_recorders
from everstep_services.agent.collectors.registry import Collectors
from everstep_services.agent.collectors.stacks import LEAST_S
from everstep_services.agent.core.actions import StopRound
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.output.log_files import first_error, tail
from everstep_services.agent.ranks.round_watch import RoundWatch
from everstep_services.agent.runtime.background import unharmed
from everstep_services.agent.runtime.urgent_work import end_urgent_work, urgent_work_ended
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.page import BadPageError, PageView

log = logging.getLogger(__name__)

TAIL_BYTES = 64 * 1024
_PUT_WITHIN_S = 5.0
_ONCE_MORE_AFTER_S = 5.0
"""A store that refuses a piece is asked once more: it may be electing a leader, or be full."""
_BESIDE_MOST = 8
"""The most collections in parallel; further ones are reported as missing, with this reason."""
_NODE_WITHIN_S = 10.0
"""For evidence that outlives the ranks: no restart waits for it."""
_CAPTURE_MOST_S = 60.0
_STREAMS = ("stderr", "stdout")
_RECORDERS = "flight_recorder"
_TRACEBACK = "Traceback (most recent call last)"
Job = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Failure:
    """A rank that ended: the id of its future fact, and its incident once known."""

    fact: str = field(default_factory=new_id)
    incident: str | None = None
    stored: dict[str, BlobRef] = field(default_factory=dict)
    """The end of each stream that the store has."""
    blobs: dict[str, BlobRef] = field(default_factory=dict)
    """Those of `stored` that no fact names yet."""
    is_recorded: bool = False
    is_good: bool = False
    """It ended as it should: not a part of any incident."""
    is_unstored: bool = False
    """The bus was away when its output should have been stored."""


@dataclass(eq=False, repr=False)
class Collections:
    """Collects in parallel with everything else, and stores the pieces; no decision waits."""

    _job: str
    _bus: Bus
    _records: AgentFacts
    _record: Callable[[Fact], None]
    _clock: Clock

    def __post_init__(self) -> None:
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._later: asyncio.Queue[Job] = asyncio.Queue()
        self._beside: asyncio.Queue[Job] = asyncio.Queue()
        self._running = 0

    def collected(self, round: int, incident: str, pieces: Sequence[Piece]) -> None:
        """Store what was collected from ranks before they were stopped."""
        for piece in pieces:
            self._jobs.put_nowait(partial(self._keep, round, incident, piece))

    def collect(
        self,
        round: int,
        incident: str,
        collectors: Mapping[str, Collector],
        scene: Scene,
        *,
        of_each: bool = False,
        is_urgent: bool = True,
    ) -> asyncio.Event:
        """Collect in parallel with everything else, and store the pieces; set once they are there.

        With `of_each`, a fact is recorded for each kind, even if it does not apply to this node.
        Without `is_urgent`, ranks that are being started go first.
        """
        done = asyncio.Event()
        if self._running >= _BESIDE_MOST:
            why = f"{_BESIDE_MOST} collections run already on this node: try again"
            self.collected(round, incident, [Piece(kind, missing=why) for kind in collectors])
            done.set()
            return done

        async def collect_and_keep() -> None:
            if not is_urgent:
                await urgent_work_ended()
            try:
                pieces = await collect(collectors, scene, self._clock)
            finally:
                done.set()
            if of_each:
                there = {piece.evidence for piece in pieces}
                why = "this node has nothing of the kind"
                pieces += [Piece(kind, missing=why) for kind in collectors if kind not in there]
            self.collected(round, incident, pieces)

        self._running += 1
        self._beside.put_nowait(collect_and_keep)
        return done

    async def collect_beside_for_ever(self) -> None:
        """Run the collections that `collect` has queued."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._do_beside(await self._beside.get()), name="collection")

    async def _do_beside(self, job: Job) -> None:
        try:
            with unharmed("a collection of evidence"):
                await job()
        finally:
            self._running -= 1
            self._beside.task_done()

    async def collect_for_ever(self) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await job()
            finally:
                self._jobs.task_done()

    async def collect_later_for_ever(self) -> None:
        while True:
            job = await self._later.get()
            await job()

    async def finish(self, within_s: float) -> None:
        """Wait for the collections under way."""
        end_urgent_work()
        try:
            async with asyncio.timeout(within_s):
                await self._beside.join()
                await self._jobs.join()
        except TimeoutError:
            log.warning("evidence_unfinished jobs=%d", self._jobs.qsize())

    async def _keep(
        self, round: int, incident: str, piece: Piece, *, was_refused: bool = False
    ) -> None:
        blob, missing = None, piece.missing
        content = await asyncio.to_thread(piece.packed)
        if content:
            try:
                async with asyncio.timeout(_PUT_WITHIN_S):
                    blob = await self._bus.blobs.put(self._job, content)
            except BusConfigError as error:  # too large for the store, now and later
                missing = str(error)
            except (BusError, TimeoutError) as error:
                is_refused = isinstance(error, BusRefusedError)
                if not (is_refused and was_refused):
                    log.info("evidence_kept_later evidence=%s error=%s", piece.evidence, error)
                    later = partial(self._keep_later, round, incident, piece, is_refused)
                    self._later.put_nowait(later)
                    return
                missing = str(error)
        self._record(
            EvidenceCollected(
                **self._records.of_round(round), node=self._records.node, incident=incident,
                evidence=piece.evidence, rank=piece.rank, blob=blob, took_s=piece.took_s,
                summary="" if piece.content is None else piece.content.summary, missing=missing,
            )
        )  # fmt: skip

    async def _keep_later(self, round: int, incident: str, piece: Piece, was_refused: bool) -> None:
        if was_refused:
            await self._clock.sleep(_ONCE_MORE_AFTER_S)
        await self._bus.wait_connected()
        await self._keep(round, incident, piece, was_refused=was_refused)


@dataclass(eq=False, repr=False)
class EvidenceRecorder(Collections):
    """The evidence of ranks that this agent has started, which includes the ends of their logs."""

    _workdir: Workdir

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logs = self._workdir.logs
        self._failures: dict[tuple[int, int], _Failure] = {}
        self._stops: tuple[int, str] | None = None
        """The round that is being stopped, or was last, and its incident."""

    def fact_of(self, round: int, rank: int) -> str | None:
        """The id of the fact about the end of this rank, even if it is not recorded yet."""
        failure = self._failures.get((round, rank))
        return None if failure is None else failure.fact

    def rank_runs(self, order: StartRanks, rank: int, pid: int) -> None:
        """Write next to the output whose it is."""

        async def describe() -> None:
            await asyncio.to_thread(self._workdir.describe, order, rank, pid)

        self._jobs.put_nowait(describe)

    def rank_exited(
        self, order: StartRanks, rank: int, pid: int, ending: RankExit, step: int | None
    ) -> None:
        """Store the output of a rank that ended, and record its end."""
        for old in [key for key in self._failures if key[0] < order.round - 1]:
            del self._failures[old]
        failure = self._failures.setdefault((order.round, rank), _Failure())
        failure.is_good = ending.is_good
        if self._stops is not None and self._stops[0] == order.round and not ending.is_good:
            failure.incident = failure.incident or self._stops[1]

        async def keep() -> None:
            problem = ""
            if not ending.is_good:
                await self._store(order.round, rank, failure)
                problem = await asyncio.to_thread(self._first_error, order.round, rank)
            fact = self._records.rank_exited(
                failure.fact, order, rank, pid, ending,
                step=step, first_error=ending.why_unseen or problem,
                log=failure.stored.get("stderr"), incident=failure.incident,
            )  # fmt: skip
            self._record(fact)
            failure.is_recorded = True
            self._say_where(order.round, rank, failure)
            if failure.is_unstored:
                self._later.put_nowait(lambda: self._try_again(order.round, rank, failure))

        self._jobs.put_nowait(keep)

    def belongs_to(self, round: int, rank: int, incident: str) -> None:
        """Rendezvous has reported the incident to which this end belongs."""
        failure = self._failures.get((round, rank))
        if failure is None or failure.incident is not None:
            return
        failure.incident = incident
        if failure.is_recorded:
            self._say_where(round, rank, failure)

    def round_stops(self, round: int, incident: str) -> None:
        """Its ranks are about to be stopped: all that fail by themselves belong to the incident.

        The rank whose end was heard first need not be the cause, and the cause is in the log of
        the rank that is.
        """
        self._stops = (round, incident)
        for (of_round, rank), failure in self._failures.items():
            if of_round == round and not failure.is_good:
                self.belongs_to(round, rank, incident)

    def round_stopped(
        self, order: StartRanks, incident: str, ranks: tuple[int, ...], suspect: int | None = None
    ) -> None:
        """Store the last output of some ranks that were stopped.

        Of rank 0, which stands for all; of the suspect; and of each whose output has a traceback:
        an exception may have ended a thread for which all wait.
        """

        async def keep(rank: int) -> None:
            failure = self._failures.setdefault((order.round, rank), _Failure(incident=incident))
            if failure.incident != incident or failure.is_recorded:
                return  # it failed by itself: its log is kept with its end
            await self._store(order.round, rank, failure)
            self._say_where(order.round, rank, failure)

        async def search(rank: int) -> None:
            for stream in _STREAMS:
                if _TRACEBACK in await asyncio.to_thread(self._tail, order.round, rank, stream):
                    await keep(rank)
                    return

        for rank in ranks:
            if (order.round, rank) not in self._failures:
                kept = keep if rank in {0, suspect} else search
                self._jobs.put_nowait(partial(kept, rank))

    async def _store(self, round: int, rank: int, failure: _Failure) -> None:
        """Store the end of each stream once: rank 0 may be stopped, and then be reaped, too."""
        failure.is_unstored = False
        for stream in _STREAMS:
            if stream in failure.stored:
                continue
            text = await asyncio.to_thread(self._tail, round, rank, stream)
            if not text:
                continue
            try:
                async with asyncio.timeout(_PUT_WITHIN_S):
                    blob = await self._bus.blobs.put(self._job, text.encode())
            except (BusError, TimeoutError) as error:
                failure.is_unstored = True
                log.info("log_kept_later rank=%d stream=%s error=%s", rank, stream, error)
            else:
                failure.stored[stream] = failure.blobs[stream] = blob

    async def _try_again(self, round: int, rank: int, failure: _Failure) -> None:
        await self._bus.wait_connected()
        await self._store(round, rank, failure)
        self._say_where(round, rank, failure)

    def _say_where(self, round: int, rank: int, failure: _Failure) -> None:
        if failure.incident is None:
            return
        for stream, blob in failure.blobs.items():
            where = self._logs.file(round, rank, stream)
            summary = f"{stream}: the last {blob.size_bytes} bytes of {where}"
            self._record(
                EvidenceCollected(
                    **self._records.of_round(round), node=self._records.node, evidence="log",
                    incident=failure.incident, rank=rank, blob=blob, summary=summary,
                )
            )  # fmt: skip
        failure.blobs = {}

    def _tail(self, round: int, rank: int, stream: str) -> str:
        start = self._logs.start(round, rank, stream)
        return tail(self._logs.file(round, rank, stream), TAIL_BYTES, start=start)

    def _first_error(self, round: int, rank: int) -> str:
        for stream in _STREAMS:
            start = self._logs.start(round, rank, stream)
            error = first_error(self._logs.file(round, rank, stream), start=start)
            if error:
                return error
        return ""


class EvidenceCollection:
    """Collects evidence of the ranks of this node: before they are stopped, and on request."""

    def __init__(
        self, recorder: EvidenceRecorder, collectors: Collectors, workdir: Workdir, clock: Clock
    ) -> None:
        self._recorder = recorder
        self._collectors = collectors
        self._workdir = workdir
        self._clock = clock
        self._unread = frozenset[int]()
        """The ranks whose flight recorders nobody could read before the last stop."""
        self._of_kept: asyncio.Event | None = None

    async def before_stop(
        self, stop: StopRound, incident: str, order: StartRanks | None, watch: RoundWatch
    ) -> None:
        """Wait for evidence that vanishes with the ranks; collect that of the node in parallel.

        After a crash, that of ranks that survive is collected while they park: `of_kept` waits.
        """
        scene = self._scene(order, watch, stop.evidence_s, may_pause=True)
        of_node = replace(scene, within_s=_NODE_WITHIN_S)
        kinds = self._collectors
        self._recorder.collect(stop.round, incident, kinds.of_node, of_node)
        of_ranks = {
            kind: collector
            for kind, collector in kinds.of_ranks.items()
            if kind not in kinds.of_ended or stop.evidence_s >= LEAST_S
        }
        if stop.evidence_s < LEAST_S and _are_kept(scene, stop.keeps):
            self._of_kept = self._recorder.collect(stop.round, incident, of_ranks, scene)
            self._unread = frozenset()
            return
        pieces = await collect(of_ranks, scene, self._clock)
        read = {rank for piece in pieces if piece.evidence == _RECORDERS for rank in piece.ranks}
        self._unread = frozenset(seen.rank for seen in scene.ranks) - read
        self._recorder.collected(stop.round, incident, pieces)

    async def of_kept(self) -> None:
        """Wait for the evidence of ranks that survive: the next round overwrites it."""
        if self._of_kept is not None:
            await self._of_kept.wait()

    def after_stop(
        self, stop: StopRound, incident: str, order: StartRanks, watch: RoundWatch
    ) -> None:
        """Read what the ranks have left, once the next ranks run.

        The stacks are among it where the time before the end of the ranks was short, and the dumps
        of ranks whose recorders could not be read in it.
        """
        if stop.evidence_s:
            kinds = self._collectors
            ended = kinds.of_ended if stop.evidence_s < LEAST_S else {}
            scene = self._scene(order, watch, _NODE_WITHIN_S)
            if self._unread and _RECORDERS in kinds.of_ranks:
                left = replace(scene, ranks=[it for it in scene.ranks if it.rank in self._unread])
                dumps = {_RECORDERS: left_recorders}
                self._recorder.collect(stop.round, incident, dumps, left, is_urgent=False)
            self._recorder.collect(
                stop.round, incident, {**ended, **kinds.of_past}, scene, is_urgent=False
            )

    def capture(self, wanted: CollectEvidence, order: StartRanks, watch: RoundWatch) -> None:
        """Collect from ranks that continue to run; an unknown kind is reported as missing."""
        within_s = min(wanted.within_s, _CAPTURE_MOST_S)
        scene = self._scene(order, watch, within_s, only=wanted.ranks)
        collectable = self._collectors.of_living
        kinds = wanted.evidence or tuple(collectable)
        why = "this agent does not collect it: agent.evidence_without, or another release"
        missing = [Piece(kind, missing=why) for kind in kinds if kind not in collectable]
        self._recorder.collected(wanted.round, wanted.incident, missing)
        collectors = {kind: collectable[kind] for kind in kinds if kind in collectable}
        self._recorder.collect(wanted.round, wanted.incident, collectors, scene, of_each=True)

    def _scene(
        self,
        order: StartRanks | None,
        watch: RoundWatch,
        within_s: float,
        *,
        may_pause: bool = False,
        only: Collection[int] = (),
    ) -> Scene:
        ranks = [seen for seen in watch.seen() if not only or seen.rank in only]
        environs = {} if order is None else self._workdir.environs(order, ranks)
        python = self._workdir.python
        return Scene(ranks, within_s, watch.began_s, environs, may_pause=may_pause, python=python)


def _are_kept(scene: Scene, keeps: Collection[int]) -> bool:
    """Whether every living process goes on after this round."""
    living = [seen for seen in scene.ranks if seen.pid]
    return all(seen.rank in keeps and _survives(seen.page) for seen in living)


def _survives(page: PageView) -> bool:
    try:
        reading = page.read()
    except BadPageError:
        return False
    return reading is not None and reading.survives > 0
