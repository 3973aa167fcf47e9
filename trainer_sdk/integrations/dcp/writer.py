"""`DcpWriter`: saves of `torch.distributed.checkpoint` through the writer of Everstep.

Torch plans which rank saves what. Each rank copies its items into a buffer, which its writer
process hashes and writes; rank 0's writer makes the checkpoint visible when all parts are durable.
"""

import io
import multiprocessing
import os
import pickle  # noqa: TID251 - torch's metadata is one; it is written here, and never read
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from msgspec.structs import replace as replace_struct
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer_sdk.checkpoint import arguments, script_end
from trainer_sdk.checkpoint.events import Reporter, SaveStartedEvent
from trainer_sdk.checkpoint.flat_state import StatePiece, as_bytes, is_bare
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.job_context import JobContext, read_job_context
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.restorer import noted_round
from trainer_sdk.checkpoint.restore.values import UnreadableValueError, read_value
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer, NoRoomError, folder_of
from trainer_sdk.checkpoint.save.plan import (
    PAGE_BYTES,
    PlacedPiece,
    layout_of,
    place_bare,
    place_pieces,
    put,
    shard_name,
    up,
)
from trainer_sdk.checkpoint.save.preparation import report_too_large
from trainer_sdk.checkpoint.save.request import Save, SaveError, SaveHandle, Timeouts
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.saver import launch_name
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.writer.protocol import SaveFailed, WriteState
from trainer_sdk.environment import environ
from trainer_sdk.integrations.dcp.checkpoint_id import root_and_step
from trainer_sdk.integrations.dcp.image import described_items, entries_of
from trainer_sdk.integrations.dcp.nearest import restored_from
from trainer_sdk.rank_session import session

_LOOK_EVERY_S = 0.005
_BUFFERS = 1
_METADATA_BYTES = 64 << 10
_INDEX_BYTES = 1 << 10
"""The room for torch's metadata: for each item, and for the rest."""
_MARKS = {is_kept: secrets.token_hex(4) for is_kept in (False, True)}
_Key = tuple[str, str, int, bool]
"""Root, job and rank, and whether images are kept: such writers share their saves."""


@dataclass(frozen=True, slots=True)
class _Common:
    """The values that rank 0 has chosen for a save, as each rank receives them in its plan."""

    mark: str
    count: int
    layout: str
    world_size: int
    rank: int
    items: int
    """The number of items on all ranks."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The place of an item, and the name of the save to which it belongs."""

    info: _StorageInfo
    saving: str


class DcpWriter(StorageWriter):
    """A `StorageWriter`: `dcp.save(state, checkpoint_id="/ckpt/step-100", storage_writer=…)`.

    `dcp.save` returns when the checkpoint is visible, or raises. All ranks use the same arguments.
    `job` is as for `Checkpointer`; with `on_error="retry"`, a save is tried three times.

    With `keep_memory`, each save also stays in the memory of the node, or on its disk, and the
    agent sends it to other nodes, as for `Checkpointer`; the newest complete state stays. Without
    `to_root`, a save goes there only: it returns when the images of all ranks are complete.
    """

    def __init__(
        self,
        checkpoint_id: "str | os.PathLike[str]" = "",
        *,
        keep_memory: bool = False,
        to_root: bool = True,
        job: str = "",
        on_error: str = "warn",
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__()
        arguments.one_of("on_error", on_error, ("warn", "retry"))
        self._keeps = arguments.truth("keep_memory", keep_memory)
        self._to_root = arguments.truth("to_root", to_root)
        if not self._to_root and not self._keeps:
            raise ValueError("to_root=False saves in memory only: give keep_memory=True as well")
        self._job = arguments.job(job)
        self._on_error = on_error
        self._timeouts = arguments.instance("timeouts", timeouts, Timeouts)
        self._root, self._step = "", 0
        self._rank = 0
        self.checkpoint_id: str | os.PathLike[str] = checkpoint_id
        if checkpoint_id:
            self.reset(checkpoint_id)

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Begin a save of this checkpoint."""
        if checkpoint_id is not None:
            self._root, self._step = root_and_step(checkpoint_id)
            self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note the rank of this process, and start its writer."""
        del args
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False makes a checkpoint of each rank, which no restore could "
                "verify as a whole: leave it True"
            )
        if not self._root:
            raise ValueError(
                "there is no checkpoint_id: give it to dcp.save, or to DcpWriter, as /ckpt/step-100"
            )
        self._rank = kwargs.get("rank", 0 if is_coordinator else 1)
        self._saves.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave torch's plan as it is, and note all items of this rank for its image."""
        self._saves.planned(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks the same name of the save."""
        if self._keeps:
            _check_world(len(plans), environ.get("WORLD_SIZE", ""))
        layout = layout_of([[_described(item) for item in plan.items] for plan in plans])
        count, items = self._saves.next_count(), sum(len(plan.items) for plan in plans)
        return [
            replace(
                plan,
                storage_data=_Common(_MARKS[self._keeps], count, layout, len(plans), rank, items),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items; its writer begins, and rank 0's when `finish` has the index."""
        with _section("dcp copy"):
            stored = self._saves.copy(self._step, plan, planner, to_root=self._to_root)
        if not self._to_root:
            self._saves.wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(stored)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and wait until the checkpoint is visible. Only rank 0 is called."""
        places: dict[Any, _StorageInfo] = {}
        for result in (result for of_rank in results for result in of_rank):
            self._saves.check(result.storage_data.saving)
            places[result.index] = result.storage_data.info
        described = replace(metadata, storage_data=places, version=CURRENT_DCP_VERSION)
        octets = io.BytesIO()
        pickle.dump(described, octets)
        if self._to_root:
            self._saves.publish(octets.getvalue())

    def close(self) -> None:
        """Wait for saves in progress, and end the writer of this root; a later save starts it."""
        if self._root:
            _close((self._root, self._job, self._rank, self._keeps))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Whether this is the path or URL of a step."""
        try:
            root_and_step(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    @property
    def _saves(self) -> "_RankSaves":
        key = self._root, self._job, self._rank, self._keeps
        return _saves_of(key, self._on_error, self._timeouts)


class _RankSaves:
    """The saves of this rank into one root; writers of the same root share it."""

    def __init__(
        self, context: JobContext, key: _Key, reporter: Reporter, queue: SaveQueue
    ) -> None:
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
        # A planner that caches plans returns that of an earlier save, with its number.
        self._count = max(common.count, self._count + 1)
        called_at = time.monotonic()
        items = [*plan.items, *self._others(plan)]
        data = [_data_of(item, planner) for item in items]
        pieces = [_piece(item, value) for item, value in zip(items, data, strict=True)]
        image = _Image.of(items, pieces, len(plan.items), is_kept=self._keeps)
        room = 0 if common.rank else _METADATA_BYTES + _INDEX_BYTES * common.items
        if self._is_too_large(image.size + room, step, to_root=to_root):
            self._stop_keeping()
            return self.copy(step, plan, planner, to_root=to_root)
        buffer = self._buffer(image.size + room)
        save = self._save = self._queue.begin(step, buffer, (), called_at)
        try:
            for place, value in zip(image.placed, data, strict=True):
                _copy(save.buffer, place, value)
            put(save.buffer, image.extra_at, image.extra, len(image.extra))
            order = self._order_for(step, common, image, to_root=to_root)
            if self._rank or not to_root:
                self._order = order
                save.order = order
                save.stall_s = time.monotonic() - called_at
                self._queue.send(save, replace_struct(order, stall_s=save.stall_s))
            else:
                self._order = order
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
        handle = SaveHandle(self._save, self._queue.hurry, lambda: _section("dcp save"))
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
        self, step: int, common: _Common, image: "_Image", *, to_root: bool
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


@dataclass(frozen=True, slots=True)
class _Image:
    """Where the items of a rank lie in its buffer: first its shard file, then the rest."""

    placed: list[PlacedPiece]
    file_bytes: int
    image_bytes: int
    extra_at: int
    described: bytes
    """The items, at `extra_at` in the image."""
    entries: bytes
    """The entries of the image, which follow it."""

    @classmethod
    def of(
        cls, items: Sequence[WriteItem], pieces: Sequence[StatePiece], own: int, *, is_kept: bool
    ) -> "_Image":
        """The places of all items; the first `own` of them are saved by this rank."""
        placed, end = place_pieces(pieces, range(own), 0)
        file_bytes = up(end, PAGE_BYTES)
        if not is_kept:
            return cls(placed, file_bytes, file_bytes, file_bytes, b"", b"")
        more, end = place_bare(pieces, range(own, len(pieces)), file_bytes)
        placed += more
        described = described_items(items, pieces, placed)
        image_bytes = up(end + len(described), PAGE_BYTES)
        return cls(placed, file_bytes, image_bytes, end, described, entries_of(end, len(described)))

    @property
    def extra(self) -> bytes:
        """All bytes from `extra_at`."""
        gap = self.image_bytes - self.extra_at - len(self.described)
        return self.described + bytes(gap) + self.entries

    @property
    def size(self) -> int:
        """Of the image and its entries, in whole pages."""
        return up(self.image_bytes + len(self.entries), PAGE_BYTES)


def _check_world(ranks: int, world_size: str) -> None:
    if world_size.isdigit() and int(world_size) != ranks:
        raise ValueError(
            f"keep_memory=True keeps the states of all ranks, and {ranks} of {world_size} ranks "
            "save here: save in a process group of all ranks, or without keep_memory"
        )


def _is_child() -> bool:
    return multiprocessing.parent_process() is not None


def _section(name: str) -> AbstractContextManager[object]:
    """A section in which the agent sees no stall."""
    return nullcontext() if _is_child() else session().section(name, "checkpoint")


def _described(item: WriteItem) -> StatePiece:
    """An item as every rank sees it."""
    about = item.tensor_data
    if about is None:
        return StatePiece(item.index.fqn, (), 0, is_bare=False)
    return StatePiece(
        key=item.index.fqn,
        path=(),
        length=0,
        is_bare=False,
        dtype=str(about.properties.dtype).removeprefix("torch."),
        shape=tuple(about.size),
        offsets=tuple(about.chunk.offsets),
        sizes=tuple(about.chunk.sizes),
    )


def _data_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor | bytes:
    """The tensor to copy, or the bytes of another value, which a restore must be able to read."""
    value = planner.resolve_data(item)
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return tensor if is_bare(tensor) else as_bytes(tensor)
    octets = value.getvalue()
    if item.type is WriteItemType.BYTE_IO:
        try:
            read_value(octets, item.index.fqn)
        except UnfitError as error:
            raise UnreadableValueError(str(error)) from error
    return octets


def _piece(item: WriteItem, data: torch.Tensor | bytes) -> StatePiece:
    if isinstance(data, bytes):
        return StatePiece(item.index.fqn, (), len(data), is_bare=False)
    return StatePiece(
        key=item.index.fqn,
        path=(),
        length=data.nbytes,
        is_bare=True,
        dtype=str(data.dtype).removeprefix("torch."),
        sizes=tuple(data.shape),
    )


def _copy(buffer: Buffer, place: PlacedPiece, data: torch.Tensor | bytes) -> None:
    begin, end = place.offset, place.offset + place.length
    if isinstance(data, bytes):
        put(buffer, begin, data, place.length)
    else:
        put(buffer, begin - len(place.head), place.head, len(place.head))
        if place.length:
            buffer.octets[begin:end].view(data.dtype).view(data.shape).copy_(data)
    put(buffer, end, place.tail, len(place.tail))


def _results(
    items: Sequence[WriteItem], placed: Iterable[PlacedPiece], order: WriteState
) -> list[WriteResult]:
    results = []
    for item, place in zip(items, placed, strict=True):
        length = len(place.head) + place.length + len(place.tail)
        info = _StorageInfo(order.shard, place.offset - len(place.head), length)
        results.append(WriteResult(item.index, place.length, _Stored(info, order.saving)))
    return results


def _enlarge(buffer: Buffer, filled: int, size: int) -> None:
    """Enlarge a buffer, and keep its first bytes."""
    before = buffer.octets[:filled].clone()
    buffer.fit(size)
    buffer.octets[:filled].copy_(before)


_opened: dict[_Key, _RankSaves] = {}
_opening = threading.RLock()


def _saves_of(key: _Key, on_error: str, timeouts: Timeouts) -> _RankSaves:
    root, job, rank, _ = key
    with _opening:
        if key not in _opened:
            context = read_job_context(environ, job, root)
            # In torch's process for saves, there is no session: that process is not the rank.
            link = None if _is_child() else session()._link  # noqa: SLF001 - one package
            reporter = Reporter(rank, link)
            queue = SaveQueue(rank, reporter, cast("Any", on_error), timeouts)
            _opened[key] = _RankSaves(context, key, reporter, queue)
        return _opened[key]


def _close(key: _Key) -> None:
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
