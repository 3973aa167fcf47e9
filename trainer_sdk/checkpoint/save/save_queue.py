"""The queue of a rank's saves: begins them, passes them to the writer, finalizes them in order.

The training's thread calls it, and the thread that reads the writer's messages. Calls return at
once, unless the caller asks to wait.
"""

import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import msgspec

from trainer_sdk.checkpoint.commits import note_commit
from trainer_sdk.checkpoint.events import Reporter, SaveEvents
from trainer_sdk.checkpoint.restore.choice import Tier
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.request import NotBegun, OnError, Save, SaveError, Timeouts
from trainer_sdk.checkpoint.save.writer_process import WriterGoneError, WriterProcess
from trainer_sdk.checkpoint.storage.port import StorageError
from trainer_sdk.checkpoint.writer.protocol import (
    BufferFilled,
    FromWriter,
    GiveUpSave,
    HurrySave,
    ImageKept,
    NextWindow,
    PartWritten,
    SaveDone,
    SaveFailed,
    SaveProgress,
    SaveStage,
    ToWriter,
    WriteFile,
    WriteState,
)
from trainer_sdk.checkpoint.writer.publication import abandon, remove_hidden

_BUSY = "an earlier save was not durable yet"
_MOST_ATTEMPTS = 3
_NEVER_RETRIED = frozenset(
    {"other_owner", "other_launch", "taken", "other_rank", "changed", "copy", "late", "no_writer"}
)
_GONE_WITHIN_S = 5.0


class SaveQueue:
    """The saves of one rank, and its writer."""

    def __init__(
        self,
        rank: int,
        reporter: Reporter,
        on_error: OnError = "warn",
        timeouts: Timeouts | None = None,
    ) -> None:
        self._rank = rank
        self._events = SaveEvents(rank, reporter, on_error)
        self._on_error = on_error
        self.timeouts = timeouts or Timeouts()
        self._last = 0
        self._is_skipping = False
        self._failure: SaveError | None = None
        """The failure of the last save, while the script has not received it."""
        self._beginner: int | None = None
        """The thread that is beginning a save now."""
        self._writer: WriterProcess | None = None
        self._abandoning: threading.Thread | None = None
        self._lock = threading.RLock()
        """Held while saves are read or changed."""
        self._saves: dict[int, Save] = {}
        """The saves that are not finalized, by number, the oldest first."""
        self.last_good: int | None = None
        """The newest step whose checkpoint is visible, as far as this rank knows."""

    @property
    def unfinished(self) -> int:
        """The number of saves that were begun and are not finalized."""
        return len(self._saves)

    @contextmanager
    def beginning(self, step: int | None, place: str = "") -> Generator[NotBegun | None]:
        """Yield None if a save may begin; else the refusal: a nested save would wait for ever.

        An earlier failed save raises here if `on_error` is "fatal".
        """
        if self._beginner == threading.get_ident():
            reason = (
                "it interrupts another save, as a signal handler does: have the handler set a "
                "flag, and save after the interrupted save"
            )
            yield self.refuse(step, "copy", reason, place=place)
            return
        self._raise_failed()
        self._beginner = threading.get_ident()
        try:
            yield None
        finally:
            self._beginner = None

    def _raise_failed(self) -> None:
        if self._on_error != "fatal":
            return
        with self._lock:
            failed = [save for save in self._saves.values() if isinstance(save.result, SaveError)]
            for save in failed[:1]:
                del self._saves[save.number]  # the caller receives its failure
                assert isinstance(save.result, SaveError)
                raise save.result

    def begin(
        self,
        step: int | None,
        buffer: Buffer,
        finalize: tuple[Callable[[], None], ...],
        called_at: float,
    ) -> Save:
        """Add a save to the queue, and reserve its buffer."""
        with self._lock:
            self._last += 1
            if self._is_skipping:
                self._is_skipping = False
                self._events.goes_on()
            buffer.is_free = False
            save = Save(self._last, step, buffer, finalize, called_at)
            self._saves[save.number] = save
            return save

    def refuse(
        self,
        step: int | None,
        stage: SaveStage,
        reason: str,
        *,
        place: str = "",
        is_reported: bool = False,
        is_printed: bool = False,
    ) -> NotBegun:
        """Refuse a save, and follow `on_error`.

        `is_reported`: the agent has the reason already; `is_printed`: it was also printed.
        """
        # `_failure_after` compares: it was refused after all saves that were begun.
        failed = SaveFailed(save=self._last, stage=stage, reason=reason, place=place)
        if not (is_reported or is_printed):
            last_good = self.last_good
            self._events.failed(step, failed, tier="global", attempt=1, last_good=last_good)
        error = SaveError(self._rank, step, failed)
        if self._on_error == "fatal":
            raise error
        self._failure = error
        if not is_printed:
            self._events.given_up(error)
        return NotBegun(step, reason, error)

    def waiting_places(self) -> list[str]:
        """The places of the saves that are not durable yet."""
        with self._lock:
            return [save.place for save in self._saves.values() if save.result is None]

    def skip(self, step: int) -> NotBegun:
        """Skip a save, as earlier saves use all buffers; reported once until a save begins."""
        self.hurry()
        with self._lock:
            waiting = [save for save in self._saves.values() if save.result is None]
            if waiting and not self._is_skipping:
                self._is_skipping = True
                self._events.skipped(step, waiting)
        return NotBegun(
            step, f"the save of step {waiting[0].step} is not durable yet" if waiting else _BUSY
        )

    # The writer.

    @property
    def writer_pid(self) -> int | None:
        """The process of the writer, if there is one."""
        writer = self._writer
        return writer.pid if writer is not None and writer.is_alive else None

    def warm(self) -> None:
        """Start a writer in advance."""
        with self._lock, suppress(WriterGoneError):
            self._ready_writer()

    def send_ahead(self, save: Save, order: WriteState) -> None:
        """Send a save that is still being copied, if a writer runs, so that it begins."""
        with self._lock:
            if save.result is None and self.writer_pid is not None:
                save.order = msgspec.structs.replace(order, is_filling=True)
                self._send(save)

    def filled(self, save: Save, end: int) -> None:
        """Tell the writer that all bytes before `end` have been in the buffer."""
        with self._lock:
            save.news_at = time.monotonic()
            self._tell_of(save, BufferFilled(save=save.number, end=end))

    def send(self, save: Save, order: WriteState | WriteFile) -> None:
        """Have a save written whose buffer, or first window, is full; unless it has failed."""
        with self._lock:
            is_begun, save.order = save.is_filling and save.is_sent, order
            if is_begun and isinstance(order, WriteState):
                whole = BufferFilled(save=save.number, end=order.image_bytes, stall_s=order.stall_s)
                self._tell_of(save, whole)
            elif save.result is None:
                self._send(save)

    def hurry(self) -> None:
        """Have all saves written without a limit of bytes a second, as the training waits."""
        with self._lock:
            for save in self._saves.values():
                if (
                    not save.is_urgent
                ):  # only once: a writer that does not read would block this call
                    save.is_urgent = True
                    self._tell_of(save, HurrySave(save=save.number))

    def fail(self, save: Save, failed: SaveFailed) -> None:
        """Fail a save, unless the writer has all of it already."""
        with self._lock:
            if not save.is_sent or save.is_filling or save.is_in_waves:
                self._fail(save, failed)

    def fail_late(self, save: Save, within_s: float) -> None:
        """Fail a save that is not durable at the end of `exit_within_s`."""
        late = f"it was not durable within {within_s:g} s of the end of the training"
        with self._lock:
            if save.is_sent and save.has_buffer and not save.is_filling:
                self._kill_writer()  # it would write bytes of the next save in this memory
            self._fail(save, save.failure(late, "late"), is_stuck=True)

    # The ends of saves.

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call the `finalize` functions of finished saves, in order; returns the saves' numbers.

        A failed save raises here if `on_error` is "fatal". With `blocking`, wait for all saves.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        if blocking:
            self.hurry()
        finalized: list[int] = []
        while (save := next(iter(self._saves.values()), None)) is not None:
            if blocking:
                save.over.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not save.over.is_set():
                break
            self._finalize(save)
            if not isinstance(save.result, SaveError):
                finalized.append(save.number)
            elif self._on_error == "fatal":
                self._failure = None  # the caller receives it
                raise save.result
        return finalized

    def await_all(self) -> SaveError | None:
        """Wait for all saves, at most `exit_within_s`; the failure that must end the training.

        None if `on_error` is "warn"; the failure of the last save if it is "retry"; any failure
        if it is "fatal".
        """
        within_s = self.timeouts.exit_within_s
        self.hurry()
        deadline = time.monotonic() + within_s
        failure = self._failure
        for save in list(self._saves.values()):
            if not save.over.wait(max(0.0, deadline - time.monotonic())):
                self.fail_late(save, within_s)
            failure = self._failure_after(save, failure)
        return None if self._on_error == "warn" else failure

    def close(self, abort: bool = False) -> SaveError | None:
        """Wait for unfinished saves, or abandon them; then end the writer.

        All `finalize` functions are called; the first of their errors is raised at the end.
        """
        failure = None if abort else self.await_all()
        self._end_writer()
        raised: list[Exception] = []
        for save in list(self._saves.values()):
            try:
                self._finalize(save)
            except Exception as error:  # noqa: BLE001 - a `finalize` function may raise anything
                raised.append(error)
        self._failure = None
        if raised:
            raise raised[0]
        return failure

    def _finalize(self, save: Save) -> None:
        with self._lock:
            if self._saves.pop(save.number, None) is None:
                return  # by another thread
        self._failure = self._failure_after(save, self._failure)
        if not isinstance(save.result, SaveError):
            for call in save.finalize:
                call()

    def _failure_after(self, save: Save, failure: SaveError | None) -> SaveError | None:
        if failure is not None and save.number <= failure.failed.save:
            return failure  # of a later save, which was refused
        if isinstance(save.result, SaveError):
            return save.result
        return None if save.lasts and self._on_error == "retry" else failure

    def _end_writer(self) -> None:
        """End the writer, and fail the saves that it still has."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        with self._lock:
            for save in self._saves.values():
                if save.result is None:
                    failed = save.failure("the training has abandoned it", "aborted")
                    self._settle(save, SaveError(self._rank, save.step, failed))
        if self._abandoning is not None:
            self._abandoning.join(_GONE_WITHIN_S)

    # The writer's messages, in the thread that reads them.

    def _receive(self, line: FromWriter) -> None:
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
            case SaveProgress():
                save.stage, save.waits_for = line.stage, line.waits_for
            case NextWindow():
                save.windows.put(None)
            case ImageKept():
                self._kept(save, line)
            case PartWritten():
                self._written(save, line)
            case SaveDone():
                self._done(save, line)
            case SaveFailed():
                self._fail(save, line, is_over=True)

    def _kept(self, save: Save, line: ImageKept) -> None:
        assert isinstance(save.order, WriteState)
        save.given_up = save.buffer.keep(save.order.identity, line.hash)
        if not save.given_up:
            self._events.kept(save, save.order, line)

    def _written(self, save: Save, line: PartWritten) -> None:
        save.stage, save.write_s, save.is_written = "publish", line.write_s, True
        if self._on_error != "retry":
            save.leave_buffer()
        if isinstance(save.order, WriteState) and save.order.root:
            self._events.written(save, save.order, line)
        elif isinstance(save.order, WriteState):
            done = SaveDone(save=save.number, place=save.place, given_up=save.given_up)
            self._settle(save, done)

    def _done(self, save: Save, line: SaveDone) -> None:
        if isinstance(save.order, WriteState):
            self.last_good = max(save.step or 0, self.last_good or 0)
            note_commit(line.place, save.order.identity.step)
            self._events.done(save, save.order, line)
        self._settle(save, line)

    # Delays and timeouts.

    def _check_limits(self, now: float) -> None:
        """Check the time limits of all saves; called about once a second while a writer runs."""
        with self._lock:
            for save in list(self._saves.values()):
                if save.retry_at is not None and now >= save.retry_at:
                    self._send(save)
                elif save.is_sent:
                    self._check_limits_of(save, now)

    def _check_limits_of(self, save: Save, now: float) -> None:
        within_s = self.timeouts.write_within_s + save.least_s
        # The writer waits as long for other ranks, and then needs some time to report it.
        most_s = 2 * within_s + self.timeouts.delayed_after_s
        if now - save.sent_at > (most_s if save.stage == "publish" else within_s):
            self._kill_writer()
            self._fail_sent(f"the writer was not done within {now - save.sent_at:.0f} s", "timeout")
        elif now >= self._next_report_at(save):
            save.reported_lag_s = now - save.called_at
            is_first, save.is_delayed = not save.is_delayed, True
            waiting = [other for other in self._saves.values() if other.is_sent]
            self._events.delayed(save, waiting, is_first=is_first)

    def _next_report_at(self, save: Save) -> float:
        """When its delay is reported next: after `delayed_after_s`, then at each doubling."""
        if save.is_delayed:
            return save.called_at + 2 * save.reported_lag_s
        # While it waits for other ranks, messages arrive all the time, without progress.
        since = save.sent_at if save.waits_for else save.news_at
        return since + self.timeouts.delayed_after_s

    def _goes_on(self, save: Save) -> None:
        if save.is_delayed:
            save.is_delayed = False
            self._events.goes_on()

    # Sending, and failures.

    def _send(self, save: Save) -> None:
        assert save.order is not None
        save.retry_at = None
        save.sent_at = save.news_at = time.monotonic()
        save.stage = "write"
        try:
            writer = self._ready_writer()
            writer.send(save.order)
            if save.is_urgent:
                writer.send(HurrySave(save=save.number))
        except WriterGoneError as error:
            self._fail(save, save.failure(str(error), "no_writer"))

    def _tell_of(self, save: Save, line: ToWriter) -> None:
        """Send a line about a save, if the writer works on it."""
        if save.is_sent and self._writer is not None:
            self._writer.send(line)

    def _ready_writer(self) -> WriterProcess:
        if self._writer is None or not self._writer.is_alive:
            self._writer = WriterProcess(self._receive, self._lost, self._check_limits)
        return self._writer

    def _kill_writer(self) -> None:
        writer, self._writer = (
            self._writer,
            None,
        )  # do not wait: it may hang in the kernel, even after SIGKILL
        if writer is not None:
            writer.kill()

    def _lost(self, gone: WriterGoneError) -> None:
        with self._lock:
            self._fail_sent(str(gone), "writer_died")

    def _fail_sent(self, reason: str, error: str) -> None:
        """Fail all saves that the writer had."""
        for save in [sent for sent in self._saves.values() if sent.is_sent]:
            self._fail(save, save.failure(reason, error), is_stuck=error == "timeout")

    def _fail(
        self, save: Save, failed: SaveFailed, *, is_stuck: bool = False, is_over: bool = False
    ) -> None:
        """Fail a save, or retry it. `is_stuck`: a call to the storage would hang this rank.

        `is_over`: its writer has reported it, and does nothing more for it.
        """
        if save.result is not None:
            return
        order = save.order
        tier: Tier = "global" if isinstance(order, WriteState) and order.root else "memory"
        self._events.failed(
            save.step, failed, tier=tier, attempt=save.attempts, last_good=self.last_good
        )
        may_retry = self._on_error == "retry" and failed.error not in _NEVER_RETRIED
        if may_retry and not save.is_in_waves and save.attempts < _MOST_ATTEMPTS:
            self._retry(save, failed)
            return
        error = SaveError(self._rank, save.step, failed)
        self._events.given_up(error)
        self._settle(save, error)
        if isinstance(order, WriteState) and order.root and not is_stuck:
            self._abandon(order, failed.reason, is_over=is_over)

    def _retry(self, save: Save, failed: SaveFailed) -> None:
        save.attempts += 1
        if save.is_filling:
            save.retry_at = math.inf  # it is sent again once the buffer is full
        elif failed.error in ("writer_died", "timeout"):
            self._send(save)  # at once, as the writer's thread ends and calls no more
        else:
            save.retry_at = time.monotonic() + save.attempts

    def _settle(self, save: Save, result: SaveDone | SaveError) -> None:
        save.result, save.retry_at = result, None
        self._goes_on(save)
        waits_for_more = save.is_filling or save.is_in_waves
        if self._writer is not None and waits_for_more and isinstance(result, SaveError):
            self._writer.send(GiveUpSave(save=save.number))
        save.leave_buffer()
        save.over.set()
        save.windows.put(None)

    def _abandon(self, order: WriteState, reason: str, *, is_over: bool) -> None:
        """Tell the other ranks by a file; if the write fails, they wait for their timeout."""
        if order.identity.world_size == 1:
            return

        def notify() -> None:
            with suppress(StorageError):
                abandon(order, reason)
                if is_over:
                    remove_hidden(order)

        notifying = threading.Thread(target=notify, name="everstep-abandon", daemon=True)
        with suppress(RuntimeError):  # at the end of the interpreter no thread can start
            notifying.start()
            self._abandoning = notifying
