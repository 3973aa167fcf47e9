"""Saves the state of a rank: planned with all ranks, copied, and given to the writer."""

import os
import socket
from collections.abc import Iterable, Mapping
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from trainer_sdk.checkpoint.events import Reporter, SaveStartedEvent
from trainer_sdk.checkpoint.flat_state import found_at
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.save.plan import fill, fill_window, put, shard_name, stretches, windows
from trainer_sdk.checkpoint.save.preparation import Preparation, PreparedSave, SaverSetup
from trainer_sdk.checkpoint.save.request import NotBegun, Save, SaveRequest
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.staging import (
    SMALL_BYTES,
    ChangedError,
    OwnedTensors,
    Stager,
    Staging,
    TensorCopy,
    optimizers_in,
)
from trainer_sdk.checkpoint.schedule.write_rate import WriteRate
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.writer.protocol import SaveFailed, WriteState

_ALONE = 0.6
"""The share of the file that is copied before the writer begins, if the training waits."""
_REPORTED_SETTLE_S = 0.05
_MOST_WORDS = 64
"""Progress lines for each save: a writer that does not read them must not block the rank."""


class Saver:
    """Plans and copies the saves of a rank. All ranks call it together."""

    def __init__(
        self,
        setup: SaverSetup,
        queue: SaveQueue,
        reporter: Reporter,
        write_rate: WriteRate,
        optimizers: Iterable[Any],
    ) -> None:
        self._setup = setup
        self._write_rate = write_rate
        self._queue = queue
        self._reporter = reporter
        self._group = setup.group
        self._preparation = Preparation(setup, queue, reporter)
        self._stager = Stager(setup.waiting)
        self._is_wait_told = False
        self._is_lazy = setup.is_lazy
        self._owned = OwnedTensors()
        self._watch(optimizers)
        self._count = 0

    def save(self, request: SaveRequest, state: Mapping[str, Any]) -> Save | NotBegun:
        """Begin a save. If it is not begun, its reason was reported already."""
        called_at = monotonic()
        self._stager.settle()
        self._watch(optimizers_in(state.values()))
        if request.wait:
            self._queue.hurry()
        ready = self._preparation.ready(request, state)
        if isinstance(ready, NotBegun):
            return ready
        self._count += 1
        self._pace(request, ready, called_at)
        save = self._queue.begin(request.step, ready.buffer, request.finalize, called_at)
        try:
            self._begin(request, ready, save)
        except BaseException as error:  # also Ctrl-C: otherwise the end would wait for this save
            self._fail(save, f"{type(error).__name__}: {error}", "copy")
            if not isinstance(error, Exception):  # only `Exception`s follow the policy
                raise
        return save

    def _begin(self, request: SaveRequest, ready: PreparedSave, save: Save) -> None:
        save.order = order = self._order(request, ready, save)
        if order.root and not self._group.rank:
            self._reporter.report(SaveStartedEvent(step=request.step, occasion=request.occasion))
        if order.window_bytes:
            self._copy_in_waves(ready, save, order)
        else:
            self._copy(ready, save, order)

    def prepare(self, state: Mapping[str, Any], restored: RestoredState | None = None) -> None:
        """Plan with all ranks, and allocate memory in the background, for the first save.

        The restored image stays until a later save of the training is complete.
        """
        self._preparation.prepare(state, restored)

    def close(self, *, keeps_images: bool) -> None:
        """Stop copying, and release the memory; images stay with `keeps_images`."""
        self._stager.close()
        self._preparation.close(keeps_images=keeps_images)

    def _copy(self, ready: PreparedSave, save: Save, order: WriteState) -> None:
        buffer = save.buffer
        buffer.forget()
        if buffer.filled_for is not ready.plan:
            fill(buffer, ready.plan)

        now, later = self._copies(ready)
        is_on_host = all(copy.source.is_cpu for copy in (*now, *later))
        # The writer slows the copy down: if the training waits for it, the writer begins later.
        next_at = 0.0 if later else _ALONE * order.file_bytes

        def copied(end: int) -> None:
            nonlocal next_at
            if not is_on_host or not order.root or not next_at <= end < order.file_bytes:
                return  # the end is sent with the whole file, once the copy is checked
            next_at = end + order.file_bytes / _MOST_WORDS
            if not save.is_filling:
                self._queue.send_ahead(save, order)
            self._queue.filled(save, end)

        def finish(error: Exception | None) -> None:
            if error is None:
                self._queue.send(save, msgspec.structs.replace(order, stall_s=save.stall_s))
                return
            is_changed = isinstance(error, ChangedError)
            self._is_lazy = self._is_lazy and not is_changed
            self._fail(save, str(error), "changed" if is_changed else "copy")

        staging = Staging(later, finish, copied, partial(self._waited, save))
        try:
            self._stager.copy(now, staging)
            save.stall_s = monotonic() - save.called_at
            self._stager.go_on(staging)
        except BaseException:
            self._stager.drop(staging)
            raise

    def _copy_in_waves(self, ready: PreparedSave, save: Save, order: WriteState) -> None:
        plan, octets = ready.plan, save.buffer.octets
        save.buffer.filled_for = None
        put(save.buffer, order.window_bytes, plan.extra, plan.extra_bytes)
        whole = stretches(plan, ready.flat, ready.values)
        for at, size in windows(plan.file_bytes, order.window_bytes):
            if at:
                save.windows.get()
            if save.over.is_set():
                return
            fill_window(octets[:size], at, whole)
            save.stall_s = monotonic() - save.called_at  # the last window may end the save
            if at:
                self._queue.filled(save, at + size)
            else:
                self._queue.send(save, order)

    def _waited(self, save: Save, for_s: float) -> None:
        save.settle_s += for_s
        if for_s >= _REPORTED_SETTLE_S and not self._is_wait_told:
            self._is_wait_told = True
            self._reporter.warn(
                f"the optimizer waited {for_s:.2g} s for the copy of step {save.step}: forward and "
                "backward take less time than the copy, so each save delays a step; settle_s of "
                "the fact shards_written has the delay of each save"
            )

    def settle(self) -> None:
        """Wait until the tensors of the latest save may be changed."""
        self._stager.settle()

    def _watch(self, optimizers: Iterable[Any]) -> None:
        if self._is_lazy:
            self._stager.watch(self._owned.add(optimizers))

    def _copies(self, ready: PreparedSave) -> tuple[list[TensorCopy], list[TensorCopy]]:
        """Split the tensors into those to copy now and later; other values are copied here."""
        plan, buffer = ready.plan, ready.buffer
        now: list[TensorCopy] = []
        later: list[TensorCopy] = []
        for at, placed in enumerate(plan.placed):
            octets = ready.values.get(placed.number)
            if octets is not None:
                put(buffer, placed.offset, octets, placed.length)
                continue
            index = plan.local.indices[placed.number]
            source = found_at(ready.flat, index)
            is_large = self._is_lazy and source.nbytes > SMALL_BYTES
            waits = is_large and self._owned.has(index.fqn, source)
            version = source._version if waits else 0  # noqa: SLF001 - torch has no public name
            copy = TensorCopy(index.fqn, source, buffer.targets[at], placed.offset, version)
            (later if waits else now).append(copy)
        return now, later

    def _order(self, request: SaveRequest, ready: PreparedSave, save: Save) -> WriteState:
        context, rank, plan = self._setup.context, self._group.rank, ready.plan
        round_ = context.round if request.round is None else request.round
        identity = Identity(
            job=context.job,
            round=round_,
            step=request.step,
            world_size=self._group.size,
            layout=plan.layout,
            rollbacks=request.rollbacks,
        )
        end = ready.window or plan.image_bytes
        return WriteState(
            save=save.number,
            image=save.buffer.path,
            folder=save.buffer.folder,
            identity=identity,
            rank=rank,
            file_bytes=plan.file_bytes,
            image_bytes=plan.image_bytes,
            metadata=(end, len(plan.metadata)),
            entries=(end + len(plan.metadata), len(plan.entries)),
            window_bytes=ready.window,
            root=self._setup.root if request.to_root else "",
            launch="" if context.is_counted else launch_name(),
            saving=saving_name(request.step, round_, plan.mark, self._count),
            shard=shard_name(rank),
            keep=bool(save.buffer.folder),
            bytes_per_s=self._bytes_per_s(request, ready),
            occasion=request.occasion,
            has_data_position=request.has_data_position,
            user=dict(request.user),
            within_s=self._setup.timeouts.write_within_s,
        )

    def _pace(self, request: SaveRequest, ready: PreparedSave, called_at: float) -> None:
        is_paced = request.to_root and not _is_awaited(request, ready)
        self._write_rate.saved(called_at, is_paced=is_paced)
        if self._setup.write_bytes_per_s is None and not self._group.rank:
            news = self._write_rate.news()
            if news is not None:
                self._reporter.warn(news)

    def _bytes_per_s(self, request: SaveRequest, ready: PreparedSave) -> int:
        if _is_awaited(request, ready):
            return 0
        asked = self._setup.write_bytes_per_s
        return self._write_rate.bytes_per_s(ready.plan.file_bytes) if asked is None else asked

    def _fail(self, save: Save, reason: str, error: str) -> None:
        self._queue.fail(
            save, SaveFailed(save=save.number, stage="copy", reason=reason, error=error)
        )


def launch_name() -> str:
    """The name of this process, for people and for the writers of others."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_awaited(request: SaveRequest, ready: PreparedSave) -> bool:
    """Whether the training waits for this save; it does for each save in waves."""
    return request.occasion != "interval" or ready.window > 0
