"""`Checkpointer`, the class that a training uses to save and to restore its state."""

import os
from collections.abc import Callable, Mapping, MutableMapping
from time import monotonic
from typing import TYPE_CHECKING, Any, SupportsFloat

import msgspec
import torch

from trainer_sdk import layout
from trainer_sdk.checkpoint import arguments, script_end
from trainer_sdk.checkpoint.data import has_position
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.restore.restore import Restored
from trainer_sdk.checkpoint.restore.restorer import Latest, Restorer
from trainer_sdk.checkpoint.save.buffers import MOST_BUFFERS
from trainer_sdk.checkpoint.save.preparation import SaverSetup
from trainer_sdk.checkpoint.save.request import (
    ON_ERROR,
    NotBegun,
    OnError,
    Save,
    SaveError,
    SaveHandle,
    SaveRequest,
    Timeouts,
)
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.saver import Saver
from trainer_sdk.checkpoint.schedule.interval import parse_every
from trainer_sdk.checkpoint.schedule.save_schedule import SaveSchedule
from trainer_sdk.checkpoint.schedule.write_rate import LEAST_BYTES_PER_S, WriteRate
from trainer_sdk.checkpoint.storage import lasting
from trainer_sdk.environment import environ
from trainer_sdk.rank_session import Session, session
from trainer_sdk.sections import Section

if TYPE_CHECKING:
    from types import TracebackType

    from trainer_sdk.numerics.skips import ActRecord, Skips

State = Mapping[str, Any]


class Checkpointer:
    """The checkpoints of one training. All ranks make the same calls of it.

    `root` is a folder or URL for the global tier; without it there are only images in memory.
    `every` is a number of steps, a time as "10min", or "auto": the interval that loses the least
    time to saves and failures, as measured. With "always" a save begins when the last one is
    durable, but so seldom that saves cost at most `max_overhead` of the time.
    `lazy` copies the tensors of optimizers while forward and backward run, and the next step of an
    optimizer waits for the rest of the copy; optimizers are taken from the state, or given.
    `memory_limit` is in bytes, for this rank: a larger state is written in waves, and the training
    waits for them.
    `write_bytes_per_s` limits how fast this rank writes the saves that are due by `every`; by
    default a limit at which the measured steps hardly slow down; 0 means without a limit. A save
    for which the training waits is written without a limit.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of the training
        self,
        root: "str | os.PathLike[str]" = "",
        *,
        every: int | str = "auto",
        max_overhead: float = 0.01,
        memory_every: int = 0,
        keep_memory: bool = False,
        on_error: OnError = "warn",
        lazy: bool = True,
        optimizers: tuple[Any, ...] = (),
        in_flight: int = 1,
        memory_limit: int = 0,
        write_bytes_per_s: int | None = None,
        job: str = "",
        timeouts: Timeouts | None = None,
    ) -> None:
        self._root = place = lasting(arguments.path("root", root))
        self._every = parse_every(every, arguments.share("max_overhead", max_overhead))
        self._memory_every = arguments.whole("memory_every", memory_every)
        arguments.one_of("on_error", on_error, ON_ERROR)
        timeouts = arguments.instance("timeouts", timeouts, Timeouts)
        keeps = arguments.truth("keep_memory", keep_memory) or bool(self._memory_every)
        in_flight = arguments.whole("in_flight", in_flight, 1, MOST_BUFFERS - 1)
        optimizers = arguments.objects("optimizers", optimizers, "register_step_pre_hook")
        self._session = session()
        about = read_job_context(environ, arguments.job(job), place)
        group = group_of_all(environ.get("WORLD_SIZE", ""))
        setup = SaverSetup(
            context=about,
            group=group,
            root=place,
            keeps=keeps,
            is_lazy=arguments.truth("lazy", lazy),
            buffers=in_flight + keeps,
            memory_limit=arguments.whole("memory_limit", memory_limit),
            write_bytes_per_s=_checked(write_bytes_per_s),
            timeouts=timeouts,
            waiting=lambda: self._wait_section("save copy"),
        )
        self._reporter = Reporter(group.rank, self._session._link)  # noqa: SLF001 - one package
        self._queue = SaveQueue(group.rank, self._reporter, on_error, setup.timeouts)
        self._write_rate = WriteRate()
        self._saver = Saver(setup, self._queue, self._reporter, self._write_rate, optimizers)
        self._queue.warm()
        # Without its own images it must not read those of another Checkpointer.
        self._restorer = Restorer(about, group, self._reporter, root=self._root, has_images=keeps)
        self._schedule: SaveSchedule | None = None
        self._has_saved_to_stop = self._is_prepared = self._is_saving = False
        self._exit_within_s = setup.timeouts.exit_within_s
        self._last_save: SaveHandle | None = None
        self._last_step: int | None = None
        """The step of the newest save to the global tier that was begun."""
        self._step_counter = _StepCounter(self._session)
        self._pid = os.getpid()
        self._is_open = True
        self._ending = script_end.OpenSaver(
            self._await_all, lambda is_failing: self._close(abort=False, is_failing=is_failing)
        )
        script_end.remember(self._ending)

    @property
    def unfinished(self) -> int:
        """The number of saves that were begun and are not finalized."""
        return self._queue.unfinished

    def latest(self) -> Latest | None:
        """The checkpoint that `restore` would try first: step and tier; None if there is none.

        All ranks call it together. It lists checkpoints, and reads manifests and the indices of
        images, but no state. So `restore` may still reject what this returns: for a wrong hash, or
        for tensors that do not fit.
        """
        return self._restorer.latest()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        allow_fresh_start: bool = False,
        strict: bool = True,
    ) -> Restored | None:
        """Load the newest state that all ranks can have and verify, or the state of `step`.

        Without `strict`, a value that the checkpoint lacks or has in another shape stays as it is,
        and values without a place in `state` are ignored; both are reported. An optimizer is loaded
        whole or not at all.

        Returns None for a fresh start: there has never been a checkpoint, or none can be used and a
        fresh start is allowed, here or by `everstep run --allow-fresh-start`. Otherwise it raises
        `RestoreError` when there is nothing to load.
        """
        arguments.state(state, is_filled=True)
        step = None if step is None else arguments.whole("step", step)
        strict = arguments.truth("strict", strict)
        is_allowed = environ.get(layout.FRESH_VARIABLE) == "1"
        is_allowed = arguments.truth("allow_fresh_start", allow_fresh_start) or is_allowed
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
        ):  # the training goes on with the tensors that are made here
            restored = self._restorer.restore(
                state, step=step, allow_fresh_start=is_allowed, strict=strict
            )
        if restored is not None:
            self._begin_after(restored, state)
        return restored

    @property
    def course(self) -> tuple[int, int]:
        """As `Identity.course` of what is saved now."""
        return self._restorer.course

    def acts(self) -> "Skips":
        """What the job has done about its numerics. All ranks call it together."""
        return self._restorer.acts()

    def roll_back(
        self, state: MutableMapping[str, Any], act: "ActRecord", acts: "Skips"
    ) -> Restored | str:
        """Go back in place to the newest checkpoint with a step below `act.before_step`.

        All ranks call it together, between two steps. The act is recorded before anything else is
        changed; then later checkpoints are quarantined. Returns why nothing was done, if nothing
        was. `RestoreError` if the training must end, as no state could be loaded.
        """
        self._await_all()
        self._queue.maybe_finalize()
        if self._restorer.latest(act.before_step) is None:
            return f"there is no checkpoint of a step before {act.before_step}"
        if why := acts.add(msgspec.structs.replace(act, course=self._restorer.course)):
            return f"it cannot be recorded: {why}"
        self._session._tear()  # noqa: SLF001 - one package
        with self._wait_section("roll back"), torch.inference_mode(mode=False), torch.no_grad():
            restored = self._restorer.go_back(state, acts)
        self._last_step = self._last_save = None
        self._begin_after(restored, state)
        if self._schedule is not None:
            self._schedule.gone_back()
        return restored

    def _begin_after(self, restored: Restored, state: State) -> None:
        if restored.choice.published:
            self._last_step, self._last_save = restored.step, None
        self._session.start_at(restored.step)
        self._is_prepared = True
        with torch.inference_mode(mode=False), torch.no_grad():
            self._saver.prepare(state, self._restorer.as_restored(restored))

    def check_loss(self, loss: SupportsFloat) -> None:
        """Check the loss of a step: NaN soon after a restore quarantines what was loaded."""
        self._restorer.see_loss(_number(loss), self._await_all)

    def step(self, step: int, state: State) -> SaveHandle | None:
        """Call this after each step: it saves when a save is due, and when the training must stop.

        Returns the save, or None if none was due. It waits only for saves that a person has
        requested, and for the save of a preemption.

        It also counts the step for the session, if the script does not call `session().step()`.
        """
        step = arguments.whole("step", step)
        arguments.state(state)
        self._step_counter.finished(step)
        self._prepare(state)
        self._queue.maybe_finalize()
        was_saving, self._is_saving = self._is_saving, self._queue.unfinished > 0
        is_saving = was_saving or self._is_saving
        self._write_rate.stepped(monotonic(), is_saving=is_saving)
        if self._session.should_stop:
            if not self._has_saved_to_stop:
                self._has_saved_to_stop = True
                return self.save(step, state, occasion="preemption", wait=True)
        elif self._session.should_save:
            return self.save(step, state, wait=True)
        elif self._root and self._is_due(step, is_saving=is_saving):
            return self.save(step, state, occasion="interval")
        elif self._memory_every and step % self._memory_every == 0:
            return self.save(step, state, to_root=False, occasion="interval")
        return None

    def save(
        self,
        step: int,
        state: State,
        *,
        to_root: bool = True,
        occasion: str = "requested",
        wait: bool = False,
        finalize: tuple[Callable[[], None], ...] = (),
    ) -> SaveHandle:
        """Save now; the handle shows the state of the save, and can wait for its end.

        The state at this call is saved, whatever the training does next. A save is skipped while
        earlier saves use all buffers. With `wait`, it waits for a buffer, and then until the
        checkpoint can be restored, or the save has failed.
        """
        step = arguments.whole("step", step)
        arguments.state(state)
        arguments.occasion(occasion)
        to_root, wait = arguments.truth("to_root", to_root), arguments.truth("wait", wait)
        finalize = arguments.functions("finalize", finalize)
        handle = self._begin(step, state, to_root, occasion, finalize, waits=wait)
        if wait and handle:
            # A preempted training is killed after a while: this wait has a bound.
            handle.wait(self._exit_within_s if occasion == "preemption" else None)
            self._queue.maybe_finalize()
        return handle

    def _begin(
        self,
        step: int,
        state: State,
        to_root: bool,
        occasion: str,
        finalize: tuple[Callable[[], None], ...] = (),
        *,
        waits: bool,
    ) -> SaveHandle:
        if not self._is_open:  # nothing would wait for the save
            reason = "its Checkpointer is closed: close it after the last save"
            script_end.remember(self._ending)
            return self._handle(self._queue.refuse(step, "plan", reason))
        request = SaveRequest(
            step=step,
            to_root=to_root and bool(self._root),
            round=self._restorer.course[0],
            rollbacks=self._restorer.course[1],
            occasion=occasion,
            wait=waits,
            has_data_position=has_position(state.values()),
            user=self._restorer.texts(),
            finalize=finalize,
        )
        with self._queue.beginning(step) as refused:
            if refused is not None:
                return self._handle(refused)
            self._restorer.close()  # the memory of images that it has verified may be replaced
            # Later saves use the memory of this one, so it must not be made in inference mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                begun = self._saver.save(request, state)
        handle = self._handle(begun)
        if isinstance(begun, Save) and request.to_root:
            self._last_step, self._last_save = step, handle
            if self._schedule is not None:
                self._schedule.saved(begun.stall_s)
        return handle

    def save_last(self, step: int, state: State) -> SaveHandle:
        """Save the last state of the training, unless the save of that step was begun already.

        It waits for a buffer, at most `exit_within_s`; `close` waits until the save is durable.
        """
        step = arguments.whole("step", step)
        arguments.state(state)
        if not self._root:
            return self._handle(
                NotBegun(step, "there is no root: states in memory end with the job")
            )
        if step == self._last_step:
            there = NotBegun(step, f"step {step} was restored, and there has been none since")
            return self._last_save or self._handle(there)
        return self._begin(step, state, to_root=True, occasion="end", waits=True)

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call the `finalize` functions of saves that are durable; returns the saves' numbers."""
        return self._queue.maybe_finalize(*arguments.wait(blocking, within_s))

    def close(self, abort: bool = False) -> None:
        """Wait for the last save, with a bound, or abandon it; then release all resources."""
        failure = self._close(abort=abort, is_failing=False)
        if failure is not None:
            raise failure

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        is_failing = error is not None and not script_end.is_good_end(error)
        failure = self._close(abort=False, is_failing=is_failing)
        if failure is not None and not is_failing:
            raise failure

    def _await_all(self) -> SaveError | None:
        """Wait for all saves, with a bound; the failure that must end the training."""
        with self._wait_section("last save"):
            self._saver.settle()
            return self._queue.await_all()

    def _prepare(self, state: State) -> None:
        """Allocate memory before the first save is due: after a step, optimizers have a state."""
        if not self._is_prepared and self._is_open:
            self._is_prepared = True
            with torch.inference_mode(mode=False), torch.no_grad():
                self._saver.prepare(state)

    def _is_due(self, step: int, *, is_saving: bool) -> bool:
        if self._schedule is None:  # the restore has read how often earlier rounds failed
            self._schedule = self._restorer.schedule(self._every)
        return self._schedule.is_due(step, is_saving=is_saving)

    def _close(self, *, abort: bool, is_failing: bool) -> SaveError | None:
        if os.getpid() != self._pid:
            return None
        script_end.forget(self._ending)
        if not self._is_open:
            return self._queue.close(abort)  # of a save that was refused since
        self._is_open = False
        self._restorer.close()
        keeps_images = True  # also if a `finalize` function raises
        try:
            with self._wait_section("last save"):
                self._saver.settle()
                failure = self._queue.close(abort)
            keeps_images = is_failing or failure is not None
        finally:
            self._restorer.saves_are_over()
            self._saver.close(keeps_images=keeps_images)
        return failure

    def _wait_section(self, name: str) -> Section:
        """A section in which the rank waits for a save, so that the agent sees no stall."""
        return self._session.section(name, "checkpoint")

    def _handle(self, save: Save | NotBegun) -> SaveHandle:
        return SaveHandle(save, self._queue.hurry, lambda: self._wait_section("save"))


class _StepCounter:
    """Counts steps for the session, if the script does not count them itself.

    Whether the script counts is known after a whole step: its call may come after ours.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counted = _steps_of(session)
        self._calls = 0
        self._is_script_counting = False

    def finished(self, step: int) -> None:
        self._calls += 1
        if self._calls == 1:
            self._number(step)
        if _steps_of(self._session) != self._counted:
            self._is_script_counting = True
        if not self._is_script_counting and self._calls > 1:
            self._session.step(step)
            self._counted = _steps_of(self._session)

    def _number(self, step: int) -> None:
        """Take the script's number, unless it counts other steps for the session than for us."""
        made = _steps_of(self._session) - self._counted
        finished = max(step - 1 + bool(made), 0)
        if made <= 1 or self._session.steps_made == finished:
            self._session.start_at(finished)


def _steps_of(session: Session) -> int:
    return session._steps  # noqa: SLF001 - one package


def _number(value: SupportsFloat) -> SupportsFloat:
    """The loss; `TypeError` for a value of another type, which is a mistake of the script."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise TypeError(f"a loss must be a number, and is {arguments.shown(value)}")
    return value


def _checked(bytes_per_s: int | None) -> int | None:
    if bytes_per_s is None:
        return None
    bytes_per_s = arguments.whole("write_bytes_per_s", bytes_per_s)
    if bytes_per_s and bytes_per_s < LEAST_BYTES_PER_S:
        raise ValueError(
            f"write_bytes_per_s must be 0 or at least {LEAST_BYTES_PER_S}, got {bytes_per_s}: "
            "a save so slow would look like one that hangs"
        )
    return bytes_per_s
