"""What a training uses: saves that cost a copy or less, and the way back."""

import os
from collections.abc import Callable, Mapping, MutableMapping
from time import monotonic
from typing import TYPE_CHECKING, Any, SupportsFloat

from trainer_sdk import layout
from trainer_sdk.checkpoint import leaving
from trainer_sdk.checkpoint.agreement import group_of_all
from trainer_sdk.checkpoint.data import has_position
from trainer_sdk.checkpoint.interval import parse_every
from trainer_sdk.checkpoint.pacing import Pacing
from trainer_sdk.checkpoint.readying import Setup, Wish
from trainer_sdk.checkpoint.restore.restoring import Restored
from trainer_sdk.checkpoint.save import OnError, Patience, SaveError
from trainer_sdk.checkpoint.saver import Saver
from trainer_sdk.checkpoint.saves import SaveQueue
from trainer_sdk.checkpoint.storage import lasting
from trainer_sdk.checkpoint.telling import Teller
from trainer_sdk.checkpoint.tempo import LEAST_BYTES_PER_S, Tempo
from trainer_sdk.checkpoint.way_back import WayBack
from trainer_sdk.checkpoint.whose import whose
from trainer_sdk.rank_session import session
from trainer_sdk.sections import Section

if TYPE_CHECKING:
    from types import TracebackType

State = Mapping[str, Any]


class Checkpointer:
    """The checkpoints of one training. All ranks make the same calls of it.

    `root` is a folder or URL for the global tier; without one there are images in memory alone.
    `every` is a number of steps, a time as "10min", or "auto": what loses least to saves and
    failures, as measured.
    `lazy` copies what an optimizer owns while forward and backward run, and has the optimizer wait
    for what is left; the optimizers are found in the state, or given.
    `memory_limit` is in bytes, for this rank: a larger state is written in waves, and the training
    waits for them.
    `write_bytes_per_s` is the most that this rank writes of the saves that are due by `every`; by
    default, what steps allow that are measured meanwhile; 0 is as fast as can be. What the training
    waits for is written as fast as can be.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of the training
        self,
        root: "str | os.PathLike[str]" = "",
        *,
        every: int | str = "auto",
        memory_every: int = 0,
        keep_memory: bool = False,
        on_error: OnError = "warn",
        lazy: bool = True,
        optimizers: tuple[Any, ...] = (),
        in_flight: int = 1,
        memory_limit: int = 0,
        write_bytes_per_s: int | None = None,
        job: str = "",
        patience: Patience | None = None,
    ) -> None:
        self._session = session()
        self._every = parse_every(every)
        self._memory_every = memory_every
        keeps = keep_memory or bool(memory_every)
        group = group_of_all()
        place = lasting(os.fspath(root))
        about = whose(os.environ, job, place)  # noqa: TID251 - a script has no settings file of ours
        setup = Setup(
            whose=about,
            group=group,
            root=place,
            keeps=keeps,
            is_lazy=lazy,
            buffers=in_flight + keeps,
            memory_limit=memory_limit,
            write_bytes_per_s=_checked(write_bytes_per_s),
            patience=patience or Patience(),
        )
        self._root = setup.root
        self._teller = Teller(group.rank, self._session._link)  # noqa: SLF001 - one package
        self._queue = SaveQueue(group.rank, self._teller, on_error, setup.patience)
        self._queue.delivery.warm()
        self._tempo = Tempo()
        self._saver = Saver(setup, self._queue, self._teller, self._tempo, optimizers)
        self._way_back = WayBack(
            about, group, self._teller, root=self._root, has_images=keeps or about.has_keeper
        )
        self._pacing: Pacing | None = None
        self._has_saved_to_stop = False
        self._last_step: int | None = None
        """The newest that was begun to be saved in the global tier."""
        self._pid = os.getpid()
        self._is_open = True
        leaving.remember(self)

    @property
    def unfinished(self) -> int:
        """How many saves were begun and are not finalized."""
        return self._queue.unfinished

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        allow_fresh_start: bool = False,
    ) -> Restored | None:
        """Load the newest state that all ranks can have and verify, or that of `step`.

        None for a fresh start: there has never been a checkpoint, or none can be used and a fresh
        start is allowed, here or by `everstep run --allow-fresh-start`. Otherwise nothing to load
        is a `RestoreError`.
        """
        is_allowed = os.environ.get(layout.FRESH_VARIABLE) == "1"  # noqa: TID251 - as above
        is_allowed = is_allowed or allow_fresh_start
        found = self._way_back.restore(state, step=step, allow_fresh_start=is_allowed)
        if found is not None:
            if found.choice.published:
                self._last_step = found.step
            self._session.start_at(found.step)
            self._saver.prepare(state, found.choice.identity)
        return found

    def loss(self, value: SupportsFloat) -> None:
        """The loss of each step: no number soon after a restore quarantines that checkpoint."""
        self._way_back.see_loss(value, self.await_all)

    def step(self, step: int, state: State) -> None:
        """Call it after each step: saves when it is due, and when the training is to stop."""
        self._queue.maybe_finalize()
        self._tempo.stepped(monotonic(), is_saving=self._queue.unfinished > 0)
        if self._session.should_stop:
            if not self._has_saved_to_stop:
                self._has_saved_to_stop = True
                self.save(step, state, occasion="preemption", wait=True)
        elif self._session.should_save:
            self.save(step, state, wait=True)
        elif self._root and self._is_due(step):
            self.save(step, state, occasion="interval")
        elif self._memory_every and step % self._memory_every == 0:
            self.save(step, state, to_root=False, occasion="interval")

    def save(
        self,
        step: int,
        state: State,
        *,
        to_root: bool = True,
        occasion: str = "requested",
        wait: bool = False,
        finalize: tuple[Callable[[], None], ...] = (),
    ) -> int | None:
        """Save now; the number of this save, or None if it was not begun.

        What is saved is the state at this call, whatever the training does next. With `wait`, wait
        for memory that earlier saves have, rather than skip.
        """
        if not self._is_open:  # nobody would wait for it
            self._queue.refuse(step, "plan", "its Checkpointer was closed before: close it last")
            return None
        wish = Wish(
            step=step,
            to_root=to_root and bool(self._root),
            occasion=occasion,
            wait=wait,
            has_data_position=has_position(state.values()),
            user=self._way_back.texts(),
            finalize=finalize,
        )
        with self._queue.beginning(step) as may_begin:
            if not may_begin:
                return None
            self._way_back.close()  # the memory of what it has checked may be made anew
            begun = self._saver.save(wish, state)
        if begun is None:
            return None
        if wish.to_root:
            self._last_step = step
            if self._pacing is not None:
                self._pacing.saved(begun.stall_s)
        return begun.number

    def save_last(self, step: int, state: State) -> int | None:
        """Save what the training ends with, unless the save of that step was begun already.

        Its own number, or None. It waits for memory, and no longer than an end may take; `close`
        waits until it is durable.
        """
        if not self._root or step == self._last_step:
            return None
        return self.save(step, state, occasion="end", wait=True)

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call what was to be called after the saves that are durable; their numbers."""
        return self._queue.maybe_finalize(blocking, within_s)

    def await_all(self) -> SaveError | None:
        """Wait for what was begun, with a bound; the failure that the training must end with."""
        with self._last_save():
            self._saver.settle()
            return self._queue.await_all()

    def close(self, abort: bool = False) -> None:
        """Wait for the last save, with a bound, or abandon it; then leave nothing behind."""
        failure = self._close(abort=abort, is_failing=False)
        if failure is not None:
            raise failure

    def leave(self, *, is_failing: bool) -> SaveError | None:
        """The same, where nobody could catch what is raised; images stay if the training fails."""
        return self._close(abort=False, is_failing=is_failing)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        is_failing = error is not None and not leaving.is_good_end(error)
        failure = self._close(abort=False, is_failing=is_failing)
        if failure is not None and not is_failing:
            raise failure

    def _is_due(self, step: int) -> bool:
        if self._pacing is None:  # what a restore has found of earlier rounds counts
            self._pacing = self._way_back.pacing(self._every)
        return self._pacing.is_due(step, is_saving=self._queue.unfinished > 0)

    def _close(self, *, abort: bool, is_failing: bool) -> SaveError | None:
        if not self._is_open or os.getpid() != self._pid:
            return None
        self._is_open = False
        leaving.forget(self)
        self._way_back.close()
        keeps_images = True  # also where what is called after a save fails
        try:
            with self._last_save():
                self._saver.settle()
                failure = self._queue.close(abort)
            keeps_images = is_failing or failure is not None
        finally:
            self._way_back.saves_are_over()
            self._saver.close(keeps_images=keeps_images)
        return failure

    def _last_save(self) -> Section:
        """Whoever waits for it has not stalled."""
        return self._session.section("last save", "checkpoint")


def _checked(bytes_per_s: int | None) -> int | None:
    if bytes_per_s and bytes_per_s < LEAST_BYTES_PER_S:
        raise ValueError(
            f"write_bytes_per_s must be 0 or at least {LEAST_BYTES_PER_S}, got {bytes_per_s}: "
            "a save so slow would look like one that hangs"
        )
    return bytes_per_s
