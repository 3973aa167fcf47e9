"""The reports of a rank about its checkpoints: events for its agent, and lines for people."""

import time
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.checkpoint.restore.choice import GLOBAL, RejectedState, Tier
from trainer_sdk.checkpoint.save.request import OnError, Save, SaveError
from trainer_sdk.checkpoint.writer.protocol import (
    ImageKept,
    PartWritten,
    SaveDone,
    SaveFailed,
    SaveStage,
    WriteState,
)
from trainer_sdk.sdk_log import warn

EventName = Literal[
    "committed",
    "delayed",
    "failed",
    "fresh",
    "image",
    "interval",
    "part_written",
    "quarantine",
    "refused",
    "restore_failed",
    "restored",
    "save_started",
]
_NAMED = 8


class CheckpointEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a rank reports; the agent makes a fact of it, and adds what the rank lacks."""

    name: ClassVar[EventName]


class SaveStartedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A save to the global tier has begun; only rank 0 reports it."""

    name = "save_started"
    step: int
    tier: Tier = GLOBAL
    occasion: str


class ImageEvent(CheckpointEvent, frozen=True, kw_only=True):
    """An image in memory is complete."""

    name = "image"
    step: int
    folder: str
    size_bytes: int
    hash: str
    world_size: int
    stall_s: float
    settle_s: float
    lag_s: float


class PartWrittenEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A rank's part of a checkpoint is durable."""

    name = "part_written"
    step: int
    tier: Tier = GLOBAL
    size_bytes: int
    ranks: tuple[int, ...]
    world_size: int
    stall_s: float
    settle_s: float
    write_s: float
    waves: int


class CommittedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A checkpoint is visible; only rank 0 reports it."""

    name = "committed"
    step: int
    tier: Tier = GLOBAL
    path: str
    size_bytes: int
    shards: int
    world_size: int
    manifest_hash: str
    lag_s: float
    stall_s: float
    write_s: float
    occasion: str
    has_data_position: bool


class FailedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A save has failed; it may be tried again. `last_good_step` is visible already."""

    name = "failed"
    step: int | None
    tier: Tier
    stage: SaveStage
    reason: str
    rank: int | UnsetType = UNSET
    path: str | UnsetType = UNSET
    error: str
    policy: OnError | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    last_good_step: int | UnsetType | None = UNSET


class RefusedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A save was refused, as there is not enough memory."""

    name = "refused"
    step: int
    reason: str
    needed_bytes: int
    available_bytes: int
    place: str


class DelayedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """Saves are delayed; a lag of 0 ends the delay."""

    name = "delayed"
    lag_s: float
    waiting: int
    waiting_bytes: int
    reason: str


class IntervalEvent(CheckpointEvent, frozen=True, kw_only=True):
    """The interval of saves has changed."""

    name = "interval"
    tier: Tier = GLOBAL
    every_steps: int
    every_s: float
    reason: str
    stall_s: float | None
    mtbf_s: float | None


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore has read from a tier."""

    tier: Tier
    ranks: int
    size_bytes: int
    read_s: float


class RestoredEvent(CheckpointEvent, frozen=True, kw_only=True):
    """All ranks have loaded a state."""

    name = "restored"
    step: int
    world_size: int
    tiers: list[TierUse]
    reason: str
    took_s: float
    rejected: list[RejectedState]
    saved_world_size: int | None
    path: str


class FreshEvent(CheckpointEvent, frozen=True, kw_only=True):
    """The training starts from scratch."""

    name = "fresh"
    cause: Literal["no_checkpoints", "allowed"]
    reason: str
    rejected: list[RejectedState]


class RestoreFailedEvent(CheckpointEvent, frozen=True, kw_only=True):
    """No state could be loaded."""

    name = "restore_failed"
    reason: str
    wanted_step: int | None
    rejected: list[RejectedState]


class QuarantineEvent(CheckpointEvent, frozen=True, kw_only=True):
    """A state was quarantined."""

    name = "quarantine"
    step: int
    tier: Tier
    cause: Literal["nan_after_load", "corrupt", "numerics"]
    reason: str
    path: str
    by: str


class Reporter:
    """Reports for one rank; without an agent, only lines. It never waits and never raises."""

    def __init__(self, rank: int, link: AgentLink | None) -> None:
        self._rank = rank
        self._link = link

    def report(self, event: CheckpointEvent) -> None:
        """Send an event to the agent."""
        if self._link is not None:
            body = msgspec.json.encode(event).decode()
            self._link.send("checkpointed", f'"event":"{event.name}","body":{body}')

    def warn(self, text: str) -> None:
        """Print one line for people."""
        warn(text, self._rank)


class SaveEvents:
    """The reports of a rank about its saves; each event once."""

    def __init__(self, rank: int, reporter: Reporter, on_error: OnError) -> None:
        self._rank = rank
        self._reporter = reporter
        self._on_error = on_error

    def kept(self, save: Save, order: WriteState, line: ImageKept) -> None:
        """Report that an image is whole."""
        self._reporter.report(
            ImageEvent(
                step=order.identity.step,
                folder=order.folder,
                size_bytes=order.image_bytes,
                hash=line.hash,
                world_size=order.identity.world_size,
                stall_s=save.stall_s,
                settle_s=save.settle_s,
                lag_s=_age(save),
            )
        )

    def written(self, save: Save, order: WriteState, line: PartWritten) -> None:
        """Report that the rank's part is durable."""
        self._reporter.report(
            PartWrittenEvent(
                step=order.identity.step,
                size_bytes=line.size_bytes,
                ranks=(self._rank,),
                world_size=order.identity.world_size,
                stall_s=save.stall_s,
                settle_s=save.settle_s,
                write_s=line.write_s,
                waves=-(-order.file_bytes // order.window_bytes) if order.window_bytes else 1,
            )
        )

    def done(self, save: Save, order: WriteState, line: SaveDone) -> None:
        """Report that the checkpoint is visible; only rank 0 does."""
        if line.given_up:
            self._reporter.warn(f"step {save.step} was not saved again: {line.given_up}")
        elif not self._rank:
            self._reporter.report(
                CommittedEvent(
                    step=order.identity.step,
                    path=line.place,
                    size_bytes=line.size_bytes,
                    shards=line.shards,
                    world_size=order.identity.world_size,
                    manifest_hash=line.manifest_hash,
                    lag_s=_age(save),
                    stall_s=save.stall_s,
                    write_s=save.write_s,
                    occasion=order.occasion,
                    has_data_position=order.has_data_position,
                )
            )

    def failed(
        self,
        step: int | None,
        failed: SaveFailed,
        *,
        tier: Tier,
        attempt: int,
        last_good: int | None,
    ) -> None:
        """Report that a save has failed; it may be tried again."""
        if failed.error == "other_rank":
            return  # the other rank reports it
        self._reporter.report(
            FailedEvent(
                step=step,
                tier=tier,
                stage=failed.stage,
                reason=failed.reason,
                rank=self._rank,
                path=failed.place,
                error=failed.error,
                policy=self._on_error,
                attempt=attempt,
                last_good_step=last_good,
            )
        )

    def given_up(self, error: SaveError) -> None:
        """Print that a save has failed and is not tried again."""
        self._reporter.warn(str(error).partition(": ")[2])

    def delayed(self, save: Save, waiting: Sequence[Save], *, is_first: bool) -> None:
        """Report that a save makes no progress: a line once, the lag to the agent each time."""
        ranks = ", ".join(map(str, save.waits_for[:_NAMED]))
        cause = f"the parts of rank {ranks} are missing" if ranks else "the storage takes nothing"
        self._delay(save.reported_lag_s, waiting, cause)
        if is_first:
            self._reporter.warn(
                f"step {save.step} is not durable after {save.reported_lag_s:.0f} s: {cause} "
                f"({save.place}); the training goes on, later saves wait"
            )

    def skipped(self, step: int, waiting: Sequence[Save]) -> None:
        """Report that a step is not saved, because earlier saves use all buffers."""
        oldest = waiting[0]
        cause = f"the save of step {oldest.step} is not durable yet"
        self._delay(_age(oldest), waiting, f"step {step} was skipped: {cause}")
        self._reporter.warn(
            f"step {step} was not saved: {cause}, after {_age(oldest):.0f} s; "
            "save less often, or give in_flight=2 for more memory"
        )

    def goes_on(self) -> None:
        """Report that no save is delayed any more."""
        self._delay(0.0, (), "it goes on")

    def _delay(self, lag_s: float, waiting: Sequence[Save], reason: str) -> None:
        size = sum(save.buffer.size for save in waiting)
        self._reporter.report(
            DelayedEvent(lag_s=lag_s, waiting=len(waiting), waiting_bytes=size, reason=reason)
        )


def _age(save: Save) -> float:
    return time.monotonic() - save.called_at
