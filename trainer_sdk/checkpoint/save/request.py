"""A save: its request, its state, its timeouts, its failure, and the handle for the script."""

import os
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.staging import WaitContext
from trainer_sdk.checkpoint.writer.protocol import (
    SaveDone,
    SaveFailed,
    SaveStage,
    WriteFile,
    WriteState,
)

OnError = Literal["warn", "retry", "fatal"]
ON_ERROR = ("warn", "retry", "fatal")
SaveState = Literal["skipped", "staged", "written", "committed", "failed"]
"""The state of a save.

- `skipped`: it was not begun, which is not a failure; `reason` says why.
- `staged`: it has the values at the call; they are being written.
- `written`: this rank's part is durable; other ranks' parts may be missing.
- `committed`: it can be restored. Without a global tier: this rank's state is whole in memory.
  If the step had a checkpoint before, that checkpoint stays, and `reason` names it.
- `failed`: there will be no checkpoint of this save; `error` says why.
"""


class SaveError(Exception):
    """A save has failed; earlier checkpoints are untouched."""

    def __init__(self, rank: int, step: int | None, failed: SaveFailed) -> None:
        subject = "a file" if step is None else f"step {step}"
        where = f" of {failed.place}" if failed.place else ""
        super().__init__(
            f"rank {rank}: the save of {subject} failed at {failed.stage}{where}: {failed.reason}"
        )
        self.failed = failed


@dataclass(frozen=True, slots=True)
class NotBegun:
    """A save that was not begun, and why."""

    step: int | None
    reason: str
    error: SaveError | None = None
    """None if nothing has failed: earlier saves use all buffers, or there is nothing to save."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The time limits of saves."""

    delayed_after_s: float = 10.0
    """The time without progress until a delay is reported; then again at each doubling."""
    write_within_s: float = 1800.0
    """The time until a writer that is not done is killed; other ranks get as long again."""
    exit_within_s: float = 600.0
    """The time for the last save, when the training ends."""

    def __post_init__(self) -> None:
        for name in ("delayed_after_s", "write_within_s", "exit_within_s"):
            seconds = arguments.seconds(name, getattr(self, name))
            object.__setattr__(self, name, seconds)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A save as the script has requested it."""

    step: int
    to_root: bool
    """Whether it goes to the global tier, too."""
    round: int | None = None
    """None for the round in which the process was started."""
    rollbacks: int = 0
    """How often that round has gone back in place."""
    occasion: str = "interval"
    wait: bool = False
    """Whether to wait for a free buffer instead of skipping the save."""
    has_data_position: bool = False
    user: tuple[tuple[str, str], ...] = ()
    finalize: tuple[Callable[[], None], ...] = ()


@dataclass(slots=True)
class Save:
    """A save that was begun. `SaveQueue` changes it under its lock.

    Its order, and how long its copy held up the training, are set by the training's thread alone.
    """

    number: int
    step: int | None
    buffer: Buffer
    finalize: tuple[Callable[[], None], ...]
    called_at: float
    order: WriteState | WriteFile | None = None
    news_at: float = 0.0
    sent_at: float = 0.0
    stage: SaveStage = "copy"
    is_written: bool = False
    """Whether this rank's part is durable."""
    given_up: str = ""
    """Why the image of an earlier save of the step stays in memory."""
    waits_for: tuple[int, ...] = ()
    stall_s: float = 0.0
    settle_s: float = 0.0
    """How long an optimizer's step waited for the rest of the copy."""
    write_s: float = 0.0
    attempts: int = 1
    retry_at: float | None = None
    is_urgent: bool = False
    """Whether the training waits for it."""
    is_delayed: bool = False
    reported_lag_s: float = 0.0
    """The lag at its last report."""
    result: SaveDone | SaveError | None = None
    has_buffer: bool = True
    """Whether its buffer is still reserved for it."""
    windows: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Gets an item when the next window may be filled, and when the save is over."""
    over: threading.Event = field(default_factory=threading.Event)

    def failure(self, reason: str, error: str) -> SaveFailed:
        """A failure of this save at its present stage."""
        return SaveFailed(
            save=self.number, stage=self.stage, reason=reason, error=error, place=self.place
        )

    def leave_buffer(self) -> None:
        """Free the buffer for another save, once."""
        if self.has_buffer:
            self.has_buffer, self.buffer.is_free = False, True

    @property
    def is_sent(self) -> bool:
        """Whether the writer works on it."""
        return self.sent_at > 0 and self.result is None and self.retry_at is None

    @property
    def least_s(self) -> float:
        """The least time of the write, by its limit of bytes a second."""
        if not isinstance(self.order, WriteState) or not self.order.bytes_per_s:
            return 0.0
        return self.order.file_bytes / self.order.bytes_per_s

    @property
    def lasts(self) -> bool:
        """Whether it outlives the node."""
        return not isinstance(self.order, WriteState) or bool(self.order.root)

    @property
    def is_filling(self) -> bool:
        """Whether the writer has its order while the buffer is still being filled."""
        return isinstance(self.order, WriteState) and self.order.is_filling

    @property
    def is_in_waves(self) -> bool:
        """Whether its buffer never has the whole state; then it cannot be retried."""
        return isinstance(self.order, WriteState) and self.order.window_bytes > 0

    @property
    def place(self) -> str:
        """The path or URL of the result."""
        match self.order:
            case WriteFile():
                return self.order.path
            case WriteState():
                return self.order.root or self.order.folder
            case None:
                return ""


class SaveHandle:
    """The handle of a save; true if it was begun. Any thread may read it, without waiting."""

    def __init__(
        self, save: Save | NotBegun, hurry: Callable[[], None], waiting: WaitContext = nullcontext
    ) -> None:
        self._save = save
        self._hurry = hurry
        self._waiting = waiting
        self._pid = os.getpid()

    @property
    def step(self) -> int | None:
        """The step of the save; None for a single file."""
        return self._save.step

    @property
    def number(self) -> int:
        """The number of the save on this rank, as in `maybe_finalize`; 0 if it was not begun."""
        return self._save.number if isinstance(self._save, Save) else 0

    @property
    def state(self) -> SaveState:
        """The present state of the save."""
        if isinstance(self._save, NotBegun):
            return "skipped" if self._save.error is None else "failed"
        if isinstance(self._save.result, SaveError):
            return "failed"
        if self._save.result is not None:
            return "committed"
        return "written" if self._save.is_written else "staged"

    @property
    def durable(self) -> bool:
        """Whether it is `committed`: the checkpoint can be restored, as far as this rank knows."""
        return self.state == "committed"

    @property
    def error(self) -> SaveError | None:
        """Why the save has failed; None if it has not."""
        if isinstance(self._save, NotBegun):
            return self._save.error
        return self._save.result if isinstance(self._save.result, SaveError) else None

    @property
    def reason(self) -> str:
        """Why it was skipped, or failed, or which checkpoint stays in its place; else empty."""
        if isinstance(self._save, NotBegun):
            return self._save.reason
        result = self._save.result
        if isinstance(result, SaveError):
            return result.failed.reason
        return result.given_up or self._save.given_up if result is not None else ""

    @property
    def file_hash(self) -> str:
        """The hash of a single file that is durable, if it was asked for; else empty."""
        result = self._save.result if isinstance(self._save, Save) else None
        return result.hash if result is not None and not isinstance(result, SaveError) else ""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save is committed or has failed; returns whether it is `durable`.

        From now on the save is written without a limit of bytes a second. Without `timeout_s`, the
        limits of `Timeouts` end the save. The agent does not count this wait as a stall.
        """
        timeout_s = None if timeout_s is None else arguments.seconds("timeout_s", timeout_s)
        save = self._save
        if isinstance(save, Save) and not save.over.is_set() and os.getpid() == self._pid:
            self._hurry()
            with self._waiting():
                save.over.wait(timeout_s)
        return self.durable

    def __bool__(self) -> bool:
        return isinstance(self._save, Save)

    def __repr__(self) -> str:
        about = f", {self.reason!r}" if self.reason else ""
        subject = "file" if self.step is None else f"step {self.step}"
        return f"<SaveHandle {subject}: {self.state}{about}>"
