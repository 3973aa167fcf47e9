"""One save on its way, how long it may take, and what it is when it comes to nothing."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.writer.protocol import Done, Failed, WriteFile, WriteState

OnError = Literal["warn", "retry", "fatal"]
ON_ERROR = ("warn", "retry", "fatal")


class SaveError(Exception):
    """A save came to nothing; the checkpoints before it are untouched."""

    def __init__(self, rank: int, step: int | None, failed: Failed) -> None:
        what = "a file" if step is None else f"step {step}"
        where = f" of {failed.place}" if failed.place else ""
        super().__init__(
            f"rank {rank}: the save of {what} failed at {failed.stage}{where}: {failed.reason}"
        )
        self.failed = failed


@dataclass(frozen=True, slots=True)
class NotBegun:
    """A save that was not begun, and why."""

    step: int | None
    reason: str
    error: SaveError | None = None
    """None where nothing has failed: earlier saves have all memory, or there is nothing to save."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long things may take."""

    delayed_after_s: float = 10.0
    """Without progress, before people are told; and again each time that it has become twice."""
    write_within_s: float = 1800.0
    """For the writer, before it is given up; then as long again for what other ranks must do."""
    exit_within_s: float = 600.0
    """For the last save, when the training ends."""

    def __post_init__(self) -> None:
        for name in ("delayed_after_s", "write_within_s", "exit_within_s"):
            found = arguments.seconds(name, getattr(self, name))
            object.__setattr__(self, name, found)


@dataclass(slots=True)
class Save:
    """One of them."""

    number: int
    step: int | None
    buffer: Buffer
    finalize: tuple[Callable[[], None], ...]
    called_at: float
    order: WriteState | WriteFile | None = None
    news_at: float = 0.0
    sent_at: float = 0.0
    stage: str = "copy"
    is_written: bool = False
    """This rank's part is durable."""
    waits_for: tuple[int, ...] = ()
    stall_s: float = 0.0
    settle_s: float = 0.0
    """For which the training waited for the rest of the copy, as an optimizer was to change it."""
    write_s: float = 0.0
    attempts: int = 1
    retry_at: float | None = None
    is_urgent: bool = False
    """The training waits for it."""
    is_delayed: bool = False
    told_lag_s: float = 0.0
    """How late it was when people were told last."""
    result: Done | SaveError | None = None
    has_buffer: bool = True
    """Its buffer is no other save's."""
    windows: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    """Has an item when the next window may be filled, or nothing more is wanted."""
    over: threading.Event = field(default_factory=threading.Event)

    def leave_buffer(self) -> None:
        """Another save may have it; from then on this one has no say about it."""
        if self.has_buffer:
            self.has_buffer, self.buffer.is_free = False, True

    @property
    def is_sent(self) -> bool:
        """The writer works on it."""
        return self.sent_at > 0 and self.result is None and self.retry_at is None

    @property
    def least_s(self) -> float:
        """How long it takes to be written where it may not be written faster."""
        if not isinstance(self.order, WriteState) or not self.order.bytes_per_s:
            return 0.0
        return self.order.file_bytes / self.order.bytes_per_s

    @property
    def lasts(self) -> bool:
        """It goes where the end of the node does not matter."""
        return not isinstance(self.order, WriteState) or bool(self.order.root)

    @property
    def is_filling(self) -> bool:
        """The writer has its order, and the buffer is still being filled."""
        return isinstance(self.order, WriteState) and self.order.is_filling

    @property
    def is_in_waves(self) -> bool:
        """Its buffer never has all of it, so that it cannot be written once more."""
        return isinstance(self.order, WriteState) and self.order.window_bytes > 0

    @property
    def place(self) -> str:
        """Where it goes."""
        match self.order:
            case WriteFile():
                return self.order.path
            case WriteState():
                return self.order.root or self.order.folder
            case None:
                return ""
