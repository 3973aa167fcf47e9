"""Streams the states of this node's ranks to the nodes that hold them, in parallel with training.

Each holder has a task of its own: a slow or missing one delays no other. The newest state goes
first, and an overtaken one is left out.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from everstep.backoff import backoff_s, jittered_s
from everstep.bus.background import in_background
from everstep.clock import Clock
from everstep.messages import Peer, StartRanks
from everstep_services.agent.replicas.coder import Coder, CodingError
from everstep_services.agent.replicas.images import CopyFile, Image, OwnImages
from everstep_services.agent.replicas.memory_file import MappedFiles
from everstep_services.agent.replicas.transfer.abortable_calls import in_thread, threads
from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.protocol import ReplicaError
from trainer_sdk.checkpoint.image_folder import RestoredState

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
_AGAIN_S = (0.2, 30.0)
_PATIENT_FAILURES = 3
"""The failures in a row before the first report: a node may merely start later than this one."""

Failed = Callable[[int, str, str, str], None]
"""A step did not reach a holder: the step, the node, why, and the cause in one word."""


@dataclass(eq=False, repr=False)
class Transmitter:
    """One task for each holder of the round."""

    _context: TransferContext
    _images: OwnImages
    _coder: Coder
    _clock: Clock
    _failed: Failed

    def __post_init__(self) -> None:
        self._readings = MappedFiles()
        self._order: StartRanks | None = None
        self._changed = asyncio.Event()
        self._news: list[asyncio.Event] = []
        self._copies: asyncio.Queue[tuple[CopyFile, Peer]] = asyncio.Queue()

    def begins(self, order: StartRanks) -> None:
        """A new round, perhaps with other holders."""
        self._order = order
        self._changed.set()

    def look(self) -> None:
        """A rank's state has become whole."""
        for event in self._news:
            event.set()

    def also(self, wanted: CopyFile, to: Peer) -> None:
        """Send this file, too: an operator or the catalog has ordered it."""
        self._copies.put_nowait((wanted, to))

    async def send_for_ever(self) -> None:
        """Send to the holders of this round, until the next round."""
        most = self._context.settings.streams
        with threads(most, "replicas-out") as pool:
            async with in_background(self._send_copies_for_ever(pool)):
                while True:
                    self._changed.clear()
                    order = self._order
                    holders = () if order is None else order.replica_peers
                    self._news = [asyncio.Event() for _ in holders]
                    feeds = [
                        self._feed(pool, order, number, holder)
                        for number, holder in enumerate(holders)
                        if order is not None
                    ]
                    async with in_background(*feeds):
                        await self._changed.wait()

    # -- one holder --------------------------------------------------------------------------------

    async def _feed(self, pool: Executor, order: StartRanks, number: int, holder: Peer) -> None:
        """Send everything new, one state after the other."""
        sent: dict[int, str] = {}
        failures = 0
        while True:
            news = self._news[number]
            news.clear()
            for image in await asyncio.to_thread(self._unsent, order, sent):
                try:
                    await self._send(pool, order, number, holder, image)
                except (ReplicaError, CodingError, OSError) as error:
                    if getattr(error, "cause", "") == "round":
                        return  # the round is over, and the next order is on its way
                    failures += 1
                    if not await self._is_news(holder, image, error, failures):
                        break
                else:
                    sent[image.head.rank] = image.head.hash
                    failures = 0
            await self._pause(news, failures)

    async def _is_news(self, holder: Peer, image: Image, error: Exception, failures: int) -> bool:
        """True if the rank has overtaken the state, to go on at once; else the link failed."""
        cause = getattr(error, "cause", "") or "failed"
        step, is_there = image.head.identity.step, await asyncio.to_thread(image.is_there)
        log.info("replica_not_sent step=%d cause=%s error=%s", step, cause, error)
        reason = str(error)
        if not is_there:
            cause = "overtaken"
            reason = (
                f"step {step} was overwritten by a newer one while it was sent: states come faster "
                f"than they can be sent; keep them less often"
            )
        if failures >= _PATIENT_FAILURES or cause in {"quota", "torn"}:
            self._failed(step, holder.node, reason, cause)
        return not is_there

    async def _pause(self, news: asyncio.Event, failures: int) -> None:
        """Wait until there is news, or it is time to look again; longer after failures."""
        if failures:
            least, most = _AGAIN_S
            await self._clock.sleep(jittered_s(backoff_s(failures, least, most)))
            return
        try:
            async with asyncio.timeout(_LOOK_EVERY_S):
                await news.wait()
        except TimeoutError:
            return

    def _unsent(self, order: StartRanks, sent: dict[int, str]) -> list[Image]:
        """The newest state of each rank of the slot that this holder does not have."""
        ranks = range(order.first_rank, order.first_rank + order.ranks)
        newest = [images[0] for rank in ranks if (images := self._images.going_on(rank))]
        return [image for image in newest if sent.get(image.head.rank) != image.head.hash]

    async def _send(
        self, pool: Executor, order: StartRanks, number: int, holder: Peer, image: Image
    ) -> None:
        copy = image.copy(order.slot, order.ranks)
        restored = await asyncio.to_thread(self._images.restored, copy.rank)
        if order.replica_parts_needed == 1:
            await self._put(pool, CopyFile(copy, image.path), holder, restored)
            return
        code = (order.replica_parts_needed, len(order.replica_peers))
        async with self._coder.parts(image, copy, *code) as parts:
            await self._put(pool, parts[number], holder, restored)

    async def _put(
        self, pool: Executor, wanted: CopyFile, holder: Peer, restored: RestoredState | None = None
    ) -> None:
        call, is_own = Call(holder, self._context), wanted.path.is_relative_to(self._images.base)
        readings = self._readings if is_own else MappedFiles()

        def put() -> None:
            octets = readings.of(wanted.path, wanted.copy.size_bytes)
            with call:
                call.put(wanted.copy, octets, restored)

        began = self._clock.now()
        await in_thread(pool, call, put)
        copy, took_s = wanted.copy, self._clock.now() - began
        log.debug(
            "replica_sent rank=%d step=%d part=%d to=%s bytes=%d took_s=%.3f",
            copy.rank, copy.step, copy.part, holder.node, copy.size_bytes, took_s,
        )  # fmt: skip

    async def _send_copies_for_ever(self, pool: Executor) -> None:
        while True:
            wanted, to = await self._copies.get()
            try:
                await self._put(pool, wanted, to)
            except (ReplicaError, OSError) as error:
                cause = getattr(error, "cause", "") or "failed"
                self._failed(wanted.copy.step, to.node, str(error), cause)
