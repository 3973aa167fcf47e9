"""Prepares a save: the plan, the memory, and the agreement of all ranks that both are there."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from trainer_sdk.checkpoint.events import FailedEvent, RefusedEvent, Reporter
from trainer_sdk.checkpoint.flat_state import FlatState, fits, flatten, found_at
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.values import as_bytes
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer, NoRoomError, folder_of
from trainer_sdk.checkpoint.save.description import PlanError
from trainer_sdk.checkpoint.save.plan import PAGE_BYTES, Plan, fill, make_plan, window_for
from trainer_sdk.checkpoint.save.request import NotBegun, SaveRequest, Timeouts
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.shared_scalars import SharedScalars
from trainer_sdk.checkpoint.save.staging import WaitContext
from trainer_sdk.checkpoint.writer.protocol import SaveStage

_LOOK_EVERY_S = 0.005


class _Hindrance(IntEnum):
    """Why a save is not begun; the highest value over all ranks decides for all ranks."""

    NONE = 0
    BUSY = 1
    NO_IMAGE = 2
    """The node's disk is full; the save can go to the root without an image."""
    NO_ROOM = 3
    BROKEN = 4


@dataclass(frozen=True, slots=True)
class SaverSetup:
    """The settings of all saves of a rank."""

    context: JobContext
    group: RankGroup
    root: str
    keeps: bool
    """Whether images are kept in the memory of the node."""
    is_lazy: bool
    buffers: int
    memory_limit: int
    """The limit for all buffers together; 0 for none."""
    write_bytes_per_s: int | None
    """The limit for saves in the background; 0: none, None: by the measured steps."""
    timeouts: Timeouts
    waiting: WaitContext = nullcontext
    """The context in which the training waits for a copy, so that the wait is not a stall."""


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """The parts that the copy of a state needs."""

    plan: Plan
    flat: FlatState
    values: dict[int, bytes]
    """The pieces that are copied as bytes, by number."""
    buffer: Buffer
    window: int
    """The bytes of the file that fit into the buffer at once; 0 if all fit."""


class Preparation:
    """Prepares the saves of a rank together with all ranks. Only one thread calls it."""

    def __init__(self, setup: SaverSetup, queue: SaveQueue, reporter: Reporter) -> None:
        self._setup = setup
        self._queue = queue
        self._reporter = reporter
        self._group = setup.group
        self.arena = Arena(
            setup.buffers, folder_of(setup.context.images, setup.group.rank) if setup.keeps else ""
        )
        self._keeps = setup.keeps
        self._former: Arena | None = None
        """The arena of earlier images, once images are not kept any more."""
        self.plan: Plan | None = None
        self._mark = os.urandom(4).hex()
        self._no_room: NoRoomError | None = None
        self._placeless = "there is no place for it: give a root, or keep_memory=True"
        self._is_placeless_printed = False
        self._broken = ""
        self._scalars = SharedScalars(setup.group)
        self._fitting = threading.Lock()
        self._making: threading.Thread | None = None

    def prepare(self, state: Mapping[str, Any], restored: RestoredState | None = None) -> None:
        """Plan with all ranks, and allocate memory in the background, for the first save."""
        if restored is not None:
            self.arena.restored(restored)
        if not (self._setup.root or self._keeps):
            return
        flat = self._flatten(state)
        if self._group.highest([flat is None]) == [1] or flat is None:
            return
        with suppress(PlanError):  # the first save reports it
            plan = self._make_plan(flat, state)
            if self._may_keep(plan):
                self.plan = plan
                self._make_memory(plan)

    def close(self, *, keeps_images: bool) -> None:
        """Release the memory; images stay with `keeps_images`, or where an agent keeps them."""
        if self._making is not None:
            self._making.join()
        keeps = self._setup.keeps and (keeps_images or self._setup.context.has_keeper)
        self.arena.close(keeps_images=keeps)
        if self._former is not None:
            self._former.close(keeps_images=keeps)

    def ready(self, request: SaveRequest, state: Mapping[str, Any]) -> PreparedSave | NotBegun:
        """Prepare a save on all ranks, or on none; if on none, the reason was reported."""
        if self._has_no_place(request):
            _, _, *highest = self._together([0, 0, *_bounds(request)], None)
            return self._refused(request, highest) or self._refused_a_place(request)
        flat = self._flatten(state)
        plan = self.plan
        values = self._values(plan, flat) if plan is not None and flat is not None else None
        buffer, hindrance = None, _Hindrance.NONE if flat is not None else _Hindrance.BROKEN
        if plan is not None and values is not None:
            buffer, hindrance = self._buffer(request, plan)
        own = [values is None, hindrance, *_bounds(request)]
        scalars = self._scalars.bounds(plan, None if values is None else flat)
        together = self._together([*own, *scalars], buffer)
        (is_new, worst, *highest), scalars = together[: len(own)], together[len(own) :]
        if (refused := self._refused(request, highest)) is not None:
            _release(buffer)
            return refused
        if is_new and worst != _Hindrance.BROKEN and flat is not None:
            _release(buffer)
            try:
                plan = self._planned(flat, request, state)
            except PlanError as error:  # on all ranks
                return self._queue.refuse(request.step, "plan", str(error))
            self.plan = plan
            if self._has_no_place(request):
                return self._refused_a_place(request)
            values = self._values(plan, flat)
            buffer, hindrance = self._buffer(request, plan)
            scalars = self._scalars.bounds(plan, flat)
            worst, *scalars = self._together([hindrance, *scalars], buffer)
            self._make_memory(plan)
        if worst or flat is None or plan is None or values is None or buffer is None:
            _release(buffer)
            return self._hindered(request, state, _Hindrance(worst), hindrance)
        self._compare_scalars(request, plan, flat, scalars)
        return PreparedSave(plan, flat, values, buffer, self._window(plan))

    def _together(self, own: Sequence[int], buffer: Buffer | None) -> list[int]:
        """The highest values over all ranks; frees the buffer if another rank has died."""
        try:
            return self._group.highest(own)
        except BaseException:  # another rank has died, or Ctrl-C
            _release(buffer)
            raise

    def _compare_scalars(
        self, request: SaveRequest, plan: Plan, flat: FlatState, highest: list[int]
    ) -> None:
        difference = self._scalars.difference(plan, flat, highest)
        if difference and not self._group.rank:
            self._reporter.warn(
                f"step {request.step}: ranks differ, and a checkpoint has one value for all: "
                f"{difference}; what each rank has for itself needs a name of its own, as "
                "PerRank gives it"
            )

    def _make_plan(self, flat: FlatState, state: Mapping[str, Any]) -> Plan:
        return make_plan(
            flat,
            self._group,
            self._mark,
            with_all=self._keeps,
            state=state,
            to_files=bool(self._setup.root),
        )

    def _planned(self, flat: FlatState, request: SaveRequest, state: Mapping[str, Any]) -> Plan:
        """Plan with all ranks; if the images of any rank are too large, stop keeping images."""
        plan = self._make_plan(flat, state)
        if self._may_keep(plan):
            return plan
        self._stop_keeping()
        self._placeless = (
            "there is no place for it: its states would take more memory than "
            "agent.checkpoints.own_most_bytes, and there is no root: raise that, or give a root"
        )
        if self._is_too_large(plan):
            report_too_large(
                self._reporter,
                request.step,
                self._setup.context,
                self._setup.root,
                copies=self._setup.buffers,
                each_bytes=plan.arena_bytes,
            )
        return self._make_plan(flat, state)

    def _stop_keeping(self) -> None:
        self._keeps, self.plan = False, None
        self._former, self.arena = self.arena, Arena(max(self._setup.buffers - 1, 1))

    def _ready_without_images(
        self, request: SaveRequest, state: Mapping[str, Any], *, of_other: bool
    ) -> PreparedSave | NotBegun:
        """Keep no images any more, on all ranks, and prepare the save again."""
        if self._making is not None:
            self._making.join()
        self._stop_keeping()
        if not of_other:
            report_not_kept(self._reporter, request.step, self._setup.root, self._no_room)
        return self.ready(request, state)

    def _may_keep(self, plan: Plan) -> bool:
        """Whether no rank's images are larger than allowed. All ranks call this together."""
        return not self._keeps or self._group.highest([self._is_too_large(plan)]) == [0]

    def _is_too_large(self, plan: Plan) -> bool:
        most = self._setup.context.images_most_bytes
        return 0 < most < plan.arena_bytes * self._setup.buffers

    def _refused(self, request: SaveRequest, highest: Sequence[int]) -> NotBegun | None:
        """Refuse the save on all ranks if they disagree on step or place; None if they agree."""
        disagreement = _disagreement(highest)
        return self._queue.refuse(request.step, "plan", disagreement) if disagreement else None

    def _has_no_place(self, request: SaveRequest) -> bool:
        return not request.to_root and not self._keeps

    def _refused_a_place(self, request: SaveRequest) -> NotBegun:
        """Refuse the save on all ranks, as there is no place for it; printed once.

        If images were given up, and saves to the root go on, nothing has failed.
        """
        if self._setup.keeps and self._setup.root:
            return NotBegun(request.step, "states are not kept on this node any more")
        is_printed, self._is_placeless_printed = self._is_placeless_printed, True
        return self._queue.refuse(request.step, "keep", self._placeless, is_printed=is_printed)

    def _flatten(self, state: Mapping[str, Any]) -> FlatState | None:
        try:
            return flatten(state)
        except Exception as error:  # noqa: BLE001 - a `state_dict` of the user may raise anything
            self._broken = f"its state cannot be read: {type(error).__name__}: {error}"
            return None

    def _values(self, plan: Plan, flat: FlatState) -> dict[int, bytes] | None:
        """The pieces that are copied as bytes, by number; None if the plan does not fit."""
        try:
            if plan.local.fingerprint != flat.fingerprint:
                return None
            at = {number: plan.local.indices[number] for number in plan.values}
            values = {n: as_bytes(found_at(flat, index), index.fqn) for n, index in at.items()}
        except Exception:  # noqa: BLE001 - the next plan reports the error
            return None
        pieces = plan.local.pieces
        if all(fits(len(octets), pieces[number].length) for number, octets in values.items()):
            return values
        return None

    def _buffer(self, request: SaveRequest, plan: Plan) -> tuple[Buffer | None, _Hindrance]:
        deadline = time.monotonic() + (self._setup.timeouts.exit_within_s if request.wait else 0.0)
        while (buffer := self.arena.next()) is None:
            if time.monotonic() >= deadline:
                return None, _Hindrance.BUSY
            time.sleep(_LOOK_EVERY_S)
        try:
            with self._fitting:
                buffer.fit(self._size_for(plan))
                buffer.is_free = False
        except NoRoomError as error:
            self._no_room = error
            may_go_without = self._setup.root and buffer.is_on_disk and error.place == buffer.folder
            return None, _Hindrance.NO_IMAGE if may_go_without else _Hindrance.NO_ROOM
        return buffer, _Hindrance.NONE

    def _size_for(self, plan: Plan) -> int:
        size = (self._window(plan) or plan.image_bytes) + plan.extra_bytes
        return max(size, 1)  # a rank that writes nothing has a buffer as well

    def _make_memory(self, plan: Plan) -> None:
        """Allocate the memory of all spare buffers, in a thread."""

        def make() -> None:
            for buffer in self.arena.spare():
                with self._fitting, suppress(NoRoomError):
                    if self.plan is plan and buffer.is_free:
                        buffer.fit(self._size_for(plan))
                        if buffer.holds is None and not self._window(plan):
                            fill(buffer, plan)

        self._making = threading.Thread(target=make, name="everstep-memory", daemon=True)
        self._making.start()

    def _window(self, plan: Plan) -> int:
        limit = self._setup.memory_limit // self._setup.buffers
        if not limit or plan.arena_bytes <= limit:
            return 0
        window = window_for(plan, limit)
        if self._keeps:
            raise self._too_limited(plan.arena_bytes, "a state that is kept in memory is whole")
        if window <= 0:
            raise self._too_limited(plan.extra_bytes + PAGE_BYTES, "metadata and index do not fit")
        return window

    def _too_limited(self, each_bytes: int, why: str) -> NoRoomError:
        needed, limit = each_bytes * self._setup.buffers, self._setup.memory_limit
        remedy = "raise it, or do without keep_memory and memory_every to save in waves"
        return NoRoomError(
            "memory_limit",
            needed,
            limit,
            f"memory_limit is {limit} bytes, and {needed} are needed, as {why}: "
            + (remedy if self._keeps else "raise it"),
        )

    def _hindered(
        self, request: SaveRequest, state: Mapping[str, Any], worst: _Hindrance, own: _Hindrance
    ) -> PreparedSave | NotBegun:
        if worst is _Hindrance.NO_IMAGE:
            return self._ready_without_images(request, state, of_other=worst > own)
        return self._not_begun(request, worst, of_other=worst > own)

    def _not_begun(
        self, request: SaveRequest, hindrance: _Hindrance, *, of_other: bool
    ) -> NotBegun:
        stage: SaveStage = "plan" if hindrance is _Hindrance.BROKEN else "memory"
        if hindrance is _Hindrance.BUSY and not request.wait:
            if not of_other:
                return self._queue.skip(request.step)
            return NotBegun(request.step, "an earlier save of another rank is not durable yet")
        if of_other:  # the affected rank reports the reason; the result is the same on all ranks
            reason = "another rank has reported why, and no rank saves alone"
            return self._queue.refuse(request.step, stage, reason, is_printed=True)
        if hindrance is _Hindrance.BROKEN:
            return self._queue.refuse(request.step, stage, self._broken)
        if hindrance is _Hindrance.BUSY:
            within_s = self._setup.timeouts.exit_within_s
            reason = f"earlier saves have used all buffers for {within_s:g} s, and are not durable"
            return self._queue.refuse(request.step, stage, reason)
        assert self._no_room is not None
        self._report_refused(request, self._no_room)
        return self._queue.refuse(request.step, stage, str(self._no_room), is_reported=True)

    def _report_refused(self, request: SaveRequest, error: NoRoomError) -> None:
        self._reporter.report(
            RefusedEvent(
                step=request.step,
                reason=str(error),
                needed_bytes=error.needed_bytes,
                available_bytes=error.available_bytes,
                place=error.place,
            )
        )


def report_too_large(
    reporter: Reporter, step: int, context: JobContext, root: str, *, copies: int, each_bytes: int
) -> None:
    """Report that a rank's images would take more memory than allowed."""
    reason = (
        f"its state is not kept in memory: {copies} copies need "
        f"{-(-each_bytes * copies >> 20)} MiB, and the limit is "
        f"{context.images_most_bytes >> 20} MiB: raise agent.checkpoints.own_most_bytes; "
        + (f"saves to {root} go on" if root else "nothing is saved, as there is no other place")
    )
    _report_quota(reporter, step, reason)


def report_not_kept(reporter: Reporter, step: int, root: str, error: NoRoomError | None) -> None:
    """Report that there is no room for a rank's image, and that no more are made."""
    reason = f"its state is not kept on this node any more: {error}; saves to {root} go on"
    _report_quota(reporter, step, reason)


def _report_quota(reporter: Reporter, step: int, reason: str) -> None:
    reporter.warn(reason)
    reporter.report(
        FailedEvent(step=step, tier="memory", stage="keep", reason=reason, error="quota")
    )


def _release(buffer: Buffer | None) -> None:
    if buffer is not None:
        buffer.is_free = True


def _bounds(request: SaveRequest) -> list[int]:
    """Numbers whose highest values over all ranks show whether all ranks agree."""
    return [request.step, -request.step, request.to_root, -request.to_root]


def _disagreement(highest: Sequence[int]) -> str:
    """How the ranks disagree on the save; empty if they agree."""
    step, least_step, to_root, least_to_root = highest
    if step != -least_step:
        return (
            f"the ranks disagree on the step: the lowest is {-least_step} and the highest {step}; "
            "have all ranks save the same step together"
        )
    if to_root != -least_to_root:
        return "some ranks save into the root and others do not: give all ranks the same to_root"
    return ""
