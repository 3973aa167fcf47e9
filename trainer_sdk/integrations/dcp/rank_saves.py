"""The saves of a rank into one root: its buffers, its order to the writer, and its waits."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace as replace_struct
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer_sdk.checkpoint import script_end
from trainer_sdk.checkpoint.events import Reporter, SaveStartedEvent
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.job_context import JobContext, read_job_context
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.restore.restorer import noted_round
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer, NoRoomError, folder_of
from trainer_sdk.checkpoint.save.plan import PAGE_BYTES, PlacedPiece, put, shard_name, up
from trainer_sdk.checkpoint.save.preparation import report_not_kept, report_too_large
from trainer_sdk.checkpoint.save.request import Save, SaveError, SaveHandle, Timeouts
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.saver import launch_name
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.writer.protocol import SaveFailed, WriteState
from trainer_sdk.environment import environ
from trainer_sdk.integrations.dcp.items import ItemPlaces, copy_into, data_of, piece_of
from trainer_sdk.integrations.dcp.nearest import restored_from
from trainer_sdk.rank_session import session

_LOOK_EVERY_S = 0.005
_BUFFERS = 1
_INDEX_BYTES = 1 << 10
_METADATA_BYTES = 64 << 10
"""The room for torch's metadata: for each item, and for the rest."""
Key = tuple[str, str, int, bool]
"""Root, job and rank, and whether images are kept: such writers share their saves."""


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """The values that rank 0 has chosen for a save, as each rank receives them in its plan."""

    mark: str
    count: int
    layout: str
    world_size: int
    rank: int
    items: int
    """The number of items on all ranks."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The place of an item, and the name of the save to which it belongs."""

    info: _StorageInfo
    saving: str


class RankSaves:
    """The saves of this rank into one root; writers of the same root share it."""

    def __init__(self, context: JobContext, key: Key, reporter: Reporter, queue: SaveQueue) -> None:
        self._context = context
        self._root, _, self._rank, self._keeps = key
        self._queue = queue
        self._reporter = reporter
        images = folder_of(context.images, self._rank) if self._keeps else ""
        self._arena = Arena(_BUFFERS + self._keeps, images)
        self._former: Arena | None = None
        """The arena of earlier images, once images are not kept any more."""
        self._restored: Identity | None = None
        self._items: list[WriteItem] = []
        """All items of this rank, also those that another rank saves for all."""
        self._count = 0
        self._save: Save | None = None
        self._order: WriteState | None = None
        self._pid = os.getpid()
        self._ending = script_end.OpenSaver(
            queue.await_all, lambda is_failing: self.close(is_failing=is_failing)
        )
        script_end.remember(self._ending)
        queue.warm()

    def begin(self) -> None:
        """Abandon a save of this rank that torch has given up, as another rank has failed."""
        save, self._save = self._save, None
        if save is not None and not save.over.is_set() and not save.is_sent:
            reason = "another rank has failed before it was complete"
            self._fail(save, reason)
        self._queue.maybe_finalize()
        restored = restored_from(self._root)
        if self._keeps and restored is not None and restored != self._restored:
            self._arena.restored(RestoredState(identity=restored, round=self._round))
            self._restored = restored

    def planned(self, plan: SavePlan) -> None:
        """Note all items of this rank; a planner that caches plans gives them once."""
        if plan.usable:
            self._items = plan.items

    def next_count(self) -> int:
        """The number of the next save, on rank 0."""
        return self._count + 1

    def copy(
        self, step: int, plan: SavePlan, planner: SavePlanner, *, to_root: bool
    ) -> list[WriteResult]:
        """Copy the items of this rank, and begin to write them, unless rank 0's lack the index."""
        common = plan.storage_data
        called_at = time.monotonic()
        items = [*plan.items, *self._others(plan)]
        data = [data_of(item, planner) for item in items]
        pieces = [piece_of(item, value) for item, value in zip(items, data, strict=True)]
        image = ItemPlaces.of(items, pieces, len(plan.items), is_kept=self._keeps)
        room = 0 if common.rank else _METADATA_BYTES + _INDEX_BYTES * common.items
        buffer = self._buffer_for(image.size + room, step, to_root=to_root)
        if buffer is None:
            self._stop_keeping()
            return self.copy(step, plan, planner, to_root=to_root)
        # A planner that caches plans returns that of an earlier save, with its number.
        self._count = max(common.count, self._count + 1)
        save = self._save = self._queue.begin(step, buffer, (), called_at)
        try:
            for place, value in zip(image.placed, data, strict=True):
                copy_into(save.buffer, place, value)
            put(save.buffer, image.extra_at, image.extra, len(image.extra))
            order = self._order_for(step, common, image, to_root=to_root)
            self._order = order
            if self._rank or not to_root:
                save.order = order
                save.stall_s = time.monotonic() - called_at
                self._queue.send(save, replace_struct(order, stall_s=save.stall_s))
            else:
                self._reporter.report(SaveStartedEvent(step=step, occasion="requested"))
        except BaseException as error:
            self._fail(save, f"{type(error).__name__}: {error}")
            raise
        return _results(plan.items, image.placed[: len(plan.items)], order)

    def check(self, saving: str) -> None:
        """`RuntimeError` if a rank has written for another save."""
        assert self._order is not None
        if saving != self._order.saving:
            raise RuntimeError(
                f"a rank has saved as {saving}, and rank 0 as {self._order.saving}: a save before "
                "has failed on some ranks, and torch uses cached plans; save without "
                "enable_plan_caching, or restart the ranks"
            )

    def publish(self, metadata: bytes) -> None:
        """Write rank 0's part with torch's metadata, and wait for the checkpoint."""
        save, order = self._save, self._order
        assert save is not None
        assert order is not None
        at = order.metadata[0]
        if save.buffer.size < at + len(metadata):
            _enlarge(save.buffer, at, at + up(len(metadata), PAGE_BYTES))
        put(save.buffer, at, metadata, len(metadata))
        whole = replace_struct(order, image=save.buffer.path, metadata=(at, len(metadata)))
        save.order = whole
        save.stall_s = time.monotonic() - save.called_at
        self._queue.send(save, replace_struct(whole, stall_s=save.stall_s))
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the save; `SaveError` if it has failed."""
        assert self._save is not None
        handle = SaveHandle(self._save, self._queue.hurry, lambda: section("dcp save"))
        handle.wait()
        self._queue.maybe_finalize()
        if handle.error is not None:
            raise handle.error

    @property
    def _round(self) -> int:
        return max(self._context.round, noted_round(self._root))

    def _others(self, plan: SavePlan) -> list[WriteItem]:
        """The items of this rank that another rank saves for all: its image needs them."""
        own = {item.index for item in plan.items}
        return [item for item in self._items if item.index not in own] if self._keeps else []

    def _is_too_large(self, size: int, step: int, *, to_root: bool) -> bool:
        most, copies = self._context.images_most_bytes, _BUFFERS + 1
        if not self._keeps or not 0 < most < size * copies:
            return False
        root = self._root if to_root else ""
        report_too_large(self._reporter, step, self._context, root, copies=copies, each_bytes=size)
        if not to_root:
            raise NoRoomError(
                self._arena.folder,
                size * copies,
                most,
                "its states would take more memory than agent.checkpoints.own_most_bytes: raise "
                "that, or save with to_root",
            )
        return True

    def _stop_keeping(self) -> None:
        self._keeps = False
        self._former, self._arena = self._arena, Arena(_BUFFERS)

    def _order_for(
        self, step: int, common: PlannedSave, image: "ItemPlaces", *, to_root: bool
    ) -> WriteState:
        context, round_ = self._context, self._round
        assert self._save is not None
        return WriteState(
            save=self._save.number,
            image=self._save.buffer.path,
            folder=self._save.buffer.folder,
            keep=self._keeps,
            identity=Identity(
                job=context.job,
                round=round_,
                step=step,
                world_size=common.world_size,
                layout=common.layout,
            ),
            rank=common.rank,
            file_bytes=image.file_bytes,
            image_bytes=image.image_bytes,
            metadata=(image.size, 0),
            entries=(image.image_bytes, len(image.entries)),
            root=self._root if to_root else "",
            launch="" if context.is_counted else launch_name(),
            saving=saving_name(step, round_, common.mark, self._count),
            shard=shard_name(common.rank),
            occasion="requested",
            within_s=self._queue.timeouts.write_within_s,
        )

    def _buffer_for(self, size: int, step: int, *, to_root: bool) -> Buffer | None:
        """A buffer; None if there is no room for images, which was reported."""
        if self._is_too_large(size, step, to_root=to_root):
            return None
        try:
            return self._buffer(size)
        except NoRoomError as error:
            if not (self._arena.is_on_disk and to_root):
                raise
            report_not_kept(self._reporter, step, self._root, error)
            return None

    def _buffer(self, size: int) -> Buffer:
        """A buffer of at least this size, once earlier saves have left it."""
        deadline = time.monotonic() + self._queue.timeouts.write_within_s
        self._queue.hurry()
        while (buffer := self._arena.next()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"an earlier save into {self._root} is not durable after "
                    f"{self._queue.timeouts.write_within_s:g} s: look at that storage"
                )
            time.sleep(_LOOK_EVERY_S)
        if buffer.size < max(size, 1):
            buffer.fit(up(size + size // 16 + 1, PAGE_BYTES))  # a state may grow a little
        buffer.forget()
        return buffer

    def _fail(self, save: Save, reason: str) -> None:
        failed = SaveFailed(save=save.number, stage="copy", reason=reason, error="copy")
        self._queue.fail(save, failed)
        self._save = None

    def close(self, *, is_failing: bool = False) -> SaveError | None:
        """Wait for saves in progress, and release the writer and its memory.

        Images stay where an agent keeps them, and if the training is failing.
        """
        if os.getpid() != self._pid:
            return None
        script_end.forget(self._ending)
        try:
            return self._queue.close()
        finally:
            keeps = is_failing or self._context.has_keeper
            self._arena.close(keeps_images=self._keeps and keeps)
            if self._former is not None:
                self._former.close(keeps_images=keeps)


def _is_child() -> bool:
    return multiprocessing.parent_process() is not None


def section(name: str) -> AbstractContextManager[object]:
    """A section in which the agent sees no stall."""
    return nullcontext() if _is_child() else session().section(name, "checkpoint")


def _results(
    items: Sequence[WriteItem], placed: Iterable[PlacedPiece], order: WriteState
) -> list[WriteResult]:
    results = []
    for item, place in zip(items, placed, strict=True):
        length = len(place.head) + place.length + len(place.tail)
        info = _StorageInfo(order.shard, place.offset - len(place.head), length)
        results.append(WriteResult(item.index, place.length, StoredItem(info, order.saving)))
    return results


def _enlarge(buffer: Buffer, filled: int, size: int) -> None:
    """Enlarge a buffer, and keep its first bytes."""
    before = buffer.octets[:filled].clone()
    buffer.fit(size)
    buffer.octets[:filled].copy_(before)


_opened: dict[Key, RankSaves] = {}
_opening = threading.RLock()


def saves_of(key: Key, on_error: str, timeouts: Timeouts) -> RankSaves:
    """The saves of this key, which all writers of the process share."""
    root, job, rank, _ = key
    with _opening:
        if key not in _opened:
            context = read_job_context(environ, job, root)
            # In torch's process for saves, there is no session: that process is not the rank.
            link = None if _is_child() else session()._link  # noqa: SLF001 - one package
            reporter = Reporter(rank, link)
            queue = SaveQueue(rank, reporter, cast("Any", on_error), timeouts)
            _opened[key] = RankSaves(context, key, reporter, queue)
        return _opened[key]


def close_saves(key: Key) -> None:
    """Wait for the saves of this key, and end their writer; a later save starts it again."""
    with _opening:
        saves = _opened.pop(key, None)
    if saves is not None:
        saves.close()


def _forget() -> None:
    """Forget the parent's saves in a forked child."""
    global _opening  # noqa: PLW0603 - another thread may have held it
    _opened.clear()
    _opening = threading.RLock()


os.register_at_fork(after_in_child=_forget)
