"""Saves on their way to where they last: who has them, what has come of them, and what follows.

One queue a rank. Its calls return at once, but for those that are asked to wait.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from trainer_sdk.checkpoint.arena import Buffer
from trainer_sdk.checkpoint.news import News
from trainer_sdk.checkpoint.save import OnError, Patience, Save, SaveError
from trainer_sdk.checkpoint.storage.port import StorageError
from trainer_sdk.checkpoint.telling import Teller
from trainer_sdk.checkpoint.writer.orders import (
    Done,
    Failed,
    FromWriter,
    Going,
    Kept,
    NextWave,
    Wave,
    WriteFile,
    WriteState,
    Written,
)
from trainer_sdk.checkpoint.writer.publishing import abandon
from trainer_sdk.checkpoint.writing import Writer, WriterGoneError

_MOST_ATTEMPTS = 3
_IN_VAIN = frozenset({"other_owner", "other_rank", "changed", "copy", "late", "no_writer"})


class SaveQueue:
    """The saves of one rank."""

    def __init__(
        self,
        rank: int,
        teller: Teller,
        on_error: OnError = "warn",
        patience: Patience | None = None,
    ) -> None:
        self._rank = rank
        self._news = News(rank, teller, on_error)
        self.on_error = on_error
        self._patience = patience or Patience()
        self._saves: dict[int, Save] = {}
        self._last = 0
        self._is_skipping = False
        self._lock = threading.RLock()
        self._writer: Writer | None = None
        self.last_good: int | None = None
        """The newest step that this rank knows to be visible."""

    @property
    def unfinished(self) -> int:
        """How many were begun and are not finalized."""
        return len(self._saves)

    @property
    def writer_pid(self) -> int | None:
        """The process of the writer, if there is one."""
        writer = self._writer
        return writer.pid if writer is not None and writer.is_alive else None

    def begin(
        self,
        step: int | None,
        buffer: Buffer,
        finalize: tuple[Callable[[], None], ...],
        called_at: float,
    ) -> Save:
        """Reserve a place in the queue, and the buffer."""
        with self._lock:
            self._last += 1
            if self._is_skipping:
                self._is_skipping = False
                self._news.goes_on()
            buffer.is_free = False
            save = Save(self._last, step, buffer, finalize, called_at)
            self._saves[save.number] = save
            return save

    def warm(self) -> None:
        """Have a writer ready."""
        with self._lock, suppress(WriterGoneError):
            self._ready_writer()

    def send(self, save: Save, order: WriteState | WriteFile) -> None:
        """All of it is in its buffer: have it written, unless it was abandoned meanwhile."""
        with self._lock:
            save.order = order
            if save.result is None:
                self._send(save)

    def wave(self, save: Save) -> None:
        """The next window is in its buffer."""
        with self._lock, suppress(WriterGoneError):
            self._ready_writer().send(Wave(save=save.number))

    def fail(self, save: Save, failed: Failed) -> None:
        """It comes to nothing, or is tried again."""
        with self._lock:
            self._fail(save, failed)

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call what was to be called after each save that is over, in order; their numbers.

        What failed raises or warns here, as the policy says. With `blocking`, wait for all.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        finalized: list[int] = []
        while (save := next(iter(self._saves.values()), None)) is not None:
            if blocking:
                save.over.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not save.over.is_set():
                break
            with self._lock:
                del self._saves[save.number]
            if isinstance(save.result, SaveError):
                if self.on_error == "fatal":
                    raise save.result
                continue
            for call in save.finalize:
                call()
            finalized.append(save.number)
        return finalized

    def close(self, abort: bool = False, within_s: float | None = None) -> SaveError | None:
        """Wait for what is unfinished, or abandon it; then end the writer. The last failure."""
        if within_s is None:
            within_s = self._patience.exit_within_s
        saves = list(self._saves.values())
        if not abort:
            self._await(saves, within_s)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for save in saves:
            self._abort(save)
        with suppress(SaveError):
            self.maybe_finalize()
        if abort:
            return None
        failed = [one.result for one in saves if isinstance(one.result, SaveError)]
        return failed[-1] if failed else None

    def refuse(self, step: int, stage: str, reason: str) -> None:
        """A save was not even begun; what follows is the policy's."""
        failed = Failed(save=0, stage=stage, reason=reason)
        self._news.failed(step, failed, tier="global", attempt=1, last_good=self.last_good)
        error = SaveError(self._rank, step, failed)
        if self.on_error == "fatal":
            raise error
        self._news.given_up(error)

    def skip(self, step: int) -> None:
        """Earlier saves still have all buffers; that is told once, until one is begun again."""
        with self._lock:
            waiting = [one for one in self._saves.values() if one.result is None]
            if waiting and not self._is_skipping:
                self._is_skipping = True
                self._news.skipped(step, waiting)

    # What the writer says, in its thread.

    def _hear(self, line: FromWriter) -> None:
        with self._lock:
            save = self._saves.get(line.save)
            if save is None or save.result is not None:
                return
            save.news_at = time.monotonic()
            if not save.waits_for:
                self._goes_on(save)
            self._act_on(save, line)

    def _act_on(self, save: Save, line: FromWriter) -> None:
        match line:
            case Going():
                save.stage, save.waits_for = line.stage, line.waits_for
            case NextWave():
                save.windows.put(None)
            case Kept():
                self._kept(save, line)
            case Written():
                self._written(save, line)
            case Done():
                self._done(save, line)
            case Failed():
                self._fail(save, line)

    def _kept(self, save: Save, line: Kept) -> None:
        save.buffer.step = save.step
        assert isinstance(save.order, WriteState)
        self._news.kept(save, save.order, line)

    def _written(self, save: Save, line: Written) -> None:
        save.stage, save.write_s = "publish", line.write_s
        if self.on_error != "retry":
            save.buffer.is_free = True
        if isinstance(save.order, WriteState) and save.order.root:
            self._news.written(save, save.order, line)
        elif isinstance(save.order, WriteState):
            self._settle(save, Done(save=save.number, place=save.place))

    def _done(self, save: Save, line: Done) -> None:
        if isinstance(save.order, WriteState):
            self.last_good = max(save.step or 0, self.last_good or 0)
            self._news.done(save, save.order, line)
        self._settle(save, line)

    def _await(self, saves: Sequence[Save], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for save in saves:
            if not save.over.wait(max(0.0, deadline - time.monotonic())):
                late = f"it was not durable within {within_s:g} s of the end of the training"
                self.fail(save, self._failed(save, late, "late"))

    def _abort(self, save: Save) -> None:
        with self._lock:
            if save.result is None:
                failed = self._failed(save, "the training has abandoned it", "aborted")
                self._settle(save, SaveError(self._rank, save.step, failed))

    # What goes wrong.

    def _send(self, save: Save) -> None:
        assert save.order is not None
        save.retry_at = None
        save.sent_at = save.news_at = time.monotonic()
        save.stage = "write"
        try:
            self._ready_writer().send(save.order)
        except WriterGoneError as error:
            self._fail(save, self._failed(save, str(error), "no_writer"))

    def _ready_writer(self) -> Writer:
        if self._writer is None or not self._writer.is_alive:
            self._writer = Writer(self._hear, self._lost, self._look)
        return self._writer

    def _lost(self, gone: WriterGoneError) -> None:
        with self._lock:
            self._fail_sent(str(gone), "writer_died")

    def _look(self, now: float) -> None:
        """Called about once a second while there is a writer."""
        with self._lock:
            for save in list(self._saves.values()):
                if save.retry_at is not None and now >= save.retry_at:
                    self._send(save)
                elif save.is_sent:
                    self._look_at(save, now)

    def _look_at(self, save: Save, now: float) -> None:
        if now - save.sent_at > self._patience.write_within_s and save.stage != "publish":
            writer, self._writer = self._writer, None  # it may hang where even a kill waits
            if writer is not None:
                writer.kill()
            late = f"the writer was not done within {self._patience.write_within_s:g} s"
            self._fail_sent(late, "timeout")
        elif not save.is_delayed:
            # While it waits for others, there is news all the time, but no progress.
            since = save.sent_at if save.waits_for else save.news_at
            if now - since > self._patience.delayed_after_s:
                save.is_delayed = True
                self._news.delayed(save, [one for one in self._saves.values() if one.is_sent])

    def _goes_on(self, save: Save) -> None:
        if save.is_delayed:
            save.is_delayed = False
            self._news.goes_on()

    def _failed(self, save: Save, reason: str, error: str) -> Failed:
        return Failed(
            save=save.number, stage=save.stage, reason=reason, error=error, place=save.place
        )

    def _fail_sent(self, reason: str, error: str) -> None:
        """All that the writer had."""
        for save in [one for one in self._saves.values() if one.is_sent]:
            self._fail(save, self._failed(save, reason, error))

    def _fail(self, save: Save, failed: Failed) -> None:
        if save.result is not None:
            return
        order = save.order
        tier = "global" if isinstance(order, WriteState) and order.root else "memory"
        self._news.failed(
            save.step, failed, tier=tier, attempt=save.attempts, last_good=self.last_good
        )
        may_retry = self.on_error == "retry" and failed.error not in _IN_VAIN and save.is_whole
        if may_retry and save.attempts < _MOST_ATTEMPTS:
            self._retry(save, failed)
            return
        error = SaveError(self._rank, save.step, failed)
        self._news.given_up(error)
        self._settle(save, error)
        if isinstance(order, WriteState) and order.root and order.identity.world_size > 1:
            threading.Thread(target=_abandon, args=(order, failed.reason), daemon=True).start()

    def _retry(self, save: Save, failed: Failed) -> None:
        save.attempts += 1
        if failed.error in ("writer_died", "timeout"):
            self._send(save)  # nobody would do it later: the writer's thread ends, too
        else:
            save.retry_at = time.monotonic() + save.attempts

    def _settle(self, save: Save, result: Done | SaveError) -> None:
        save.result, save.retry_at = result, None
        self._goes_on(save)
        save.buffer.is_free = True
        save.windows.put(None)
        save.over.set()


def _abandon(order: WriteState, reason: str) -> None:
    """Let the other ranks know; where the storage takes nothing, they wait as long as they may."""
    with suppress(StorageError):
        abandon(order.root, order.saving, order.identity.step, order.rank, reason)
