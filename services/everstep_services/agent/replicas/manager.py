"""The states in the memory of this node: its own are sent and fetched, others' are held."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Protocol

import msgspec

from everstep.bus.background import in_background
from everstep.clock import Clock
from everstep.messages import CopyReplica, ReleaseImages, StartRanks
from everstep_services.agent.core.actions import AboutStates
from everstep_services.agent.replicas.coder import Coder
from everstep_services.agent.replicas.images import CopyFile, OwnImages
from everstep_services.agent.replicas.last_state import LastState
from everstep_services.agent.replicas.store import HeldCopy, ReplicaStore
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.fetcher import Fetcher, Offers
from everstep_services.agent.replicas.transfer.server import ReplicaServer
from everstep_services.agent.replicas.transfer.transmitter import Transmitter
from trainer_sdk.checkpoint.image_folder import release_images

log = logging.getLogger(__name__)

CODED = "coded"


class StateEvents(Protocol):
    """The recorder of what happens to states."""

    def stored(self, held: HeldCopy, by: str, took_s: float) -> None:
        """All ranks of a slot are here for the first time in a round; `held` is the last copy."""

    def failed(self, step: int, node: str, reason: str, cause: str) -> None:
        """The state of a step did not reach a node that should hold it."""

    def released(self, order: ReleaseImages, tier: str, folder: Path) -> None:
        """A quarantined state may be restored again."""


class ReplicaManager:
    """Runs the transfers of states below one folder, in parallel with the ranks."""

    def __init__(
        self, context: TransferContext, folder: Path, store: ReplicaStore, clock: Clock,
        events: StateEvents, last_state: LastState | None = None,
    ) -> None:  # fmt: skip
        self._context = context
        self._folder = folder
        self._store = store
        self._images = OwnImages(folder, context.job)
        self._sending = Transmitter(
            context, self._images, Coder(folder / CODED), clock, events.failed
        )
        self._fetching = Fetcher(context, store, self._images, folder / CODED)
        self._offers = Offers(folder)
        self._events = events
        self._last_state = last_state
        """The state that was here last."""
        self._told: set[int] = set()
        self._suspect: set[int] = set()
        self._changed = asyncio.Event()
        self._tidying = asyncio.Event()
        self._asked: asyncio.Queue[AboutStates] = asyncio.Queue()

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started: fetch their states."""
        self._context.begins(order)
        self._told.clear()
        self._store.begins()
        self._sending.begins(order)
        self._changed.set()

    def look(self) -> None:
        """A rank's state has become whole."""
        self._sending.look()
        self._tidying.set()

    def distrust(self, step: int) -> None:
        """Training from this step led to a NaN or the like: it is not fetched again."""
        self._suspect.add(step)

    def ask(self, order: AboutStates) -> None:
        """Copy or release states that this node holds."""
        self._asked.put_nowait(order)

    async def keep_for_ever(self, door: socket.socket | None) -> None:
        """Run until cancelled. Without a listener nothing is held for others."""
        loops = [
            self._sending.send_for_ever(),
            self._fetch_for_ever(),
            self._tidy_for_ever(),
            self._obey_for_ever(),
        ]
        if door is not None:
            loop = asyncio.get_running_loop()

            def arrived(held: HeldCopy, by: str, took_s: float) -> None:
                if self._store.has_all(held):
                    loop.call_soon_threadsafe(self._arrived, held, by, took_s)

            server = ReplicaServer(door, self._context, self._store, self._images, arrived)
            loops.append(server.serve_for_ever())
        async with in_background(*loops):
            await asyncio.Event().wait()

    def _arrived(self, held: HeldCopy, by: str, took_s: float) -> None:
        slot = held.copy.slot
        if slot not in self._told:
            self._told.add(slot)
            self._events.stored(held, by, took_s)

    async def _fetch_for_ever(self) -> None:
        while True:
            self._changed.clear()
            order = self._context.order
            async with in_background(*([] if order is None else [self._fetch(order)])):
                await self._changed.wait()

    async def _fetch(self, order: StartRanks) -> None:
        offer = await self._fetching.fetch(order, frozenset(self._suspect))
        if not offer.complete and self._last_state is not None:
            offer = msgspec.structs.replace(offer, lost=self._last_state.lost())
        await asyncio.to_thread(self._offers.write, offer)

    async def _tidy_for_ever(self) -> None:
        while True:
            await self._tidying.wait()
            self._tidying.clear()
            if (order := self._context.order) is not None:
                await asyncio.to_thread(self._tidy, order)

    def _tidy(self, order: StartRanks) -> None:
        """Drop fetched states once every rank has a newer state of its own."""
        newest = []
        for rank in range(order.first_rank, order.first_rank + order.ranks):
            images = self._images.going_on(rank)
            if not images:
                return
            newest.append(images[0].head.age)
        freed = self._store.drop(order.slot, before=min(newest))
        if freed:
            log.info("fetched_dropped slot=%d bytes=%d", order.slot, freed)
        self._images.drop_others(range(order.first_rank, order.first_rank + order.ranks))

    async def _obey_for_ever(self) -> None:
        while True:
            match await self._asked.get():
                case CopyReplica() as order:
                    await self._copy(order)
                case ReleaseImages() as order:
                    await self._release(order)

    async def _copy(self, order: CopyReplica) -> None:
        files = await asyncio.to_thread(self._here, order)
        log.info("replica_copied slot=%d files=%d", order.owner_slot, len(files))
        for file in files:
            self._sending.also(file, order.to)

    async def _release(self, order: ReleaseImages) -> None:
        """Allow states of this step to be restored, and fetched, again."""
        self._suspect.discard(order.step)
        released = await asyncio.to_thread(release_images, self._folder, order.step)
        log.info("images_released step=%d by=%s files=%d", order.step, order.by, len(released))
        for tier, folder in released:
            self._events.released(order, tier, folder)

    def _here(self, order: CopyReplica) -> list[CopyFile]:
        held = self._store.of_slot(order.owner_slot, order.step)
        files = [CopyFile(copy.copy, copy.path) for copy in held]
        own = self._context.order
        if own is None or own.slot != order.owner_slot:
            return files
        for rank in range(own.first_rank, own.first_rank + own.ranks):
            files.extend(
                CopyFile(image.copy(own.slot, own.ranks), image.path)
                for image in self._images.of(rank)
                if image.head.identity.step == order.step
            )
        return files
