"""The saves of a training: begun, waited for, finalized in their order.

One queue a rank. Its calls return at once, but for those that are asked to wait.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.events import News, Teller
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.delivery import Delivery
from trainer_sdk.checkpoint.save.request import NotBegun, OnError, Save, SaveError, Timeouts
from trainer_sdk.checkpoint.writer.protocol import Failed

_BUSY = "an earlier save was not durable yet"


class SaveQueue:
    """The saves of one rank."""

    def __init__(
        self,
        rank: int,
        teller: Teller,
        on_error: OnError = "warn",
        timeouts: Timeouts | None = None,
    ) -> None:
        self._rank = rank
        self._news = News(rank, teller, on_error)
        self._on_error = on_error
        self._timeouts = timeouts or Timeouts()
        self._last = 0
        self._is_skipping = False
        self._failure: SaveError | None = None
        """That of the last save, where nobody was given it."""
        self._beginner: int | None = None
        """The thread that is beginning a save."""
        self.delivery = Delivery(rank, self._news, on_error, self._timeouts)
        self._saves = self.delivery.saves

    @property
    def unfinished(self) -> int:
        """How many were begun and are not finalized."""
        return len(self._saves)

    @contextmanager
    def beginning(self, step: int | None, place: str = "") -> Generator[NotBegun | None]:
        """None if a save may begin: one that interrupts another would wait for it, and for ever."""
        if self._beginner == threading.get_ident():
            reason = (
                "it interrupts another save, as a signal handler does: have the handler set a "
                "flag, and save when that one has returned"
            )
            yield self.refuse(step, "copy", reason, place=place)
            return
        self._beginner = threading.get_ident()
        try:
            yield None
        finally:
            self._beginner = None

    def begin(
        self,
        step: int | None,
        buffer: Buffer,
        finalize: tuple[Callable[[], None], ...],
        called_at: float,
    ) -> Save:
        """Reserve a place in the queue, and the buffer."""
        with self.delivery.lock:
            self._last += 1
            if self._is_skipping:
                self._is_skipping = False
                self._news.goes_on()
            buffer.is_free = False
            save = Save(self._last, step, buffer, finalize, called_at)
            self._saves[save.number] = save
            return save

    def refuse(
        self,
        step: int | None,
        stage: str,
        reason: str,
        *,
        place: str = "",
        is_told: bool = False,
        is_known: bool = False,
    ) -> NotBegun:
        """A save was not even begun; what follows is the policy's.

        `is_told` of what the agent has heard already, `is_known` of what people have, too.
        """
        failed = Failed(save=0, stage=stage, reason=reason, place=place)
        if not (is_told or is_known):
            last_good = self.delivery.last_good
            self._news.failed(step, failed, tier="global", attempt=1, last_good=last_good)
        error = SaveError(self._rank, step, failed)
        if self._on_error == "fatal":
            raise error
        self._failure = error
        if not is_known:
            self._news.given_up(error)
        return NotBegun(step, reason, error)

    def waiting_places(self) -> list[str]:
        """Where the saves go that are not durable yet."""
        with self.delivery.lock:
            return [one.place for one in self._saves.values() if one.result is None]

    def skip(self, step: int) -> NotBegun:
        """Earlier saves still have all buffers; that is told once, until one is begun again."""
        self.delivery.hurry()
        with self.delivery.lock:
            waiting = [one for one in self._saves.values() if one.result is None]
            if waiting and not self._is_skipping:
                self._is_skipping = True
                self._news.skipped(step, waiting)
        return NotBegun(
            step, f"the save of step {waiting[0].step} is not durable yet" if waiting else _BUSY
        )

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call what was to be called after each save that is over, in order; their numbers.

        What failed raises or warns here, as the policy says. With `blocking`, wait for all.
        """
        deadline = None if within_s is None else time.monotonic() + within_s
        if blocking:
            self.delivery.hurry()
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
                self._failure = None  # the caller is given it
                raise save.result
        return finalized

    def await_all(self) -> SaveError | None:
        """Wait for what was begun, as long as an end may take; what the training must end with.

        That is nothing where failures are only said; of those that are tried again, the last
        save's; and any that is fatal.
        """
        within_s = self._timeouts.exit_within_s
        self.delivery.hurry()
        deadline = time.monotonic() + within_s
        failure = self._failure
        for save in list(self._saves.values()):
            if not save.over.wait(max(0.0, deadline - time.monotonic())):
                self.delivery.fail_late(save, within_s)
            failure = self._unsaid_after(save, failure)
        return None if self._on_error == "warn" else failure

    def close(self, abort: bool = False) -> SaveError | None:
        """Wait for what is unfinished, or abandon it; then end the writer.

        All that is to be called is, whatever is raised by it, of which the first goes on.
        """
        failure = None if abort else self.await_all()
        self.delivery.close()
        raised: list[Exception] = []
        for save in list(self._saves.values()):
            try:
                self._finalize(save)
            except Exception as error:  # noqa: BLE001 - it is the training's
                raised.append(error)
        self._failure = None
        if raised:
            raise raised[0]
        return failure

    def _finalize(self, save: Save) -> None:
        with self.delivery.lock:
            if self._saves.pop(save.number, None) is None:
                return  # by another thread
        self._failure = self._unsaid_after(save, self._failure)
        if not isinstance(save.result, SaveError):
            for call in save.finalize:
                call()

    def _unsaid_after(self, save: Save, failure: SaveError | None) -> SaveError | None:
        if isinstance(save.result, SaveError):
            return save.result
        return None if save.lasts and self._on_error == "retry" else failure


def waiting(blocking: object, within_s: object) -> tuple[bool, float | None]:
    """The arguments of a wait, checked."""
    bound = None if within_s is None else arguments.seconds("within_s", within_s)
    return arguments.truth("blocking", blocking), bound
