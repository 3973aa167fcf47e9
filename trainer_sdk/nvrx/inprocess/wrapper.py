"""`Wrapper`: restarts a function on all ranks, in the same processes, when it fails on one of them.

Under `everstep run` the layers share the work. An exception, or a function that stands still, is
restarted here, in the process. A process that is gone is the agent's: it starts the ranks again.
"""

import dataclasses
import functools
import gc
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from trainer_sdk.environment import environ
from trainer_sdk.nvrx import nccl_check
from trainer_sdk.nvrx.inprocess.absence import AGAIN, DONE, END
from trainer_sdk.nvrx.inprocess.compose import Compose
from trainer_sdk.nvrx.inprocess.interruption import Interruptible, Progress, RankShouldRestart
from trainer_sdk.nvrx.inprocess.iteration_store import IterationStore
from trainer_sdk.nvrx.inprocess.plugins import (
    Abort,
    AbortTorchDistributed,
    Completion,
    Finalize,
    HealthCheck,
    Initialize,
    Terminate,
)
from trainer_sdk.nvrx.inprocess.rank_assignment import (
    ActivateAllRanks,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
)
from trainer_sdk.nvrx.inprocess.state import FrozenState, HealthCheckError, Mode, State
from trainer_sdk.nvrx.inprocess.stores import TCPStore
from trainer_sdk.nvrx.inprocess.watch import IterationWatch, MonitorLink
from trainer_sdk.rank_session import session
from trainer_sdk.sdk_log import quoted, warn, warn_once
from trainer_sdk.survive.group_abort import begin_groups, watch_groups

_PLUGINS: "Mapping[str, type]" = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
}
_SECOND = timedelta(seconds=1)
_calls = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A decorator with NVRx's parameters: `@Wrapper(initialize=RetryController(10))`."""

    store_factory: Callable[..., Any] = TCPStore
    store_kwargs: "Mapping[str, Any] | None" = None
    initialize: Initialize | None = None
    abort: Abort | None = dataclasses.field(default_factory=AbortTorchDistributed)
    finalize: Finalize | None = None
    health_check: HealthCheck | None = None
    rank_assignment: RankAssignment = dataclasses.field(
        default_factory=lambda: typing.cast(
            "RankAssignment", Compose(ActivateAllRanks(), ShiftRanks())
        )
    )
    monitor_thread_interval: timedelta = _SECOND
    monitor_process_interval: timedelta = _SECOND
    heartbeat_interval: timedelta = _SECOND
    progress_watchdog_interval: timedelta = _SECOND
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = _SECOND
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    enabled: bool = True
    completion: Completion | None = None
    terminate: Terminate | None = None

    def __post_init__(self) -> None:
        for name, kind in _PLUGINS.items():
            plugin = getattr(self, name)
            if plugin is not None and not isinstance(plugin, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, and is {plugin!r}")
        if not isinstance(self.rank_assignment, RankAssignment):
            raise TypeError(
                f"rank_assignment must be a RankAssignment, and is {self.rank_assignment!r}"
            )
        for field in dataclasses.fields(self):
            is_time = isinstance(field.default, timedelta)
            if is_time and not isinstance(getattr(self, field.name), timedelta):
                raise TypeError(
                    f"{field.name} must be a timedelta, and is {getattr(self, field.name)!r}"
                )
        self._check_order()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with restarts."""
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            with CallWrapper(self) as call:
                return call(fn, arguments, named)

        return wrapped

    def _check_order(self) -> None:
        for lower, upper in (
            ("soft_timeout", "hard_timeout"),
            ("hard_timeout", "barrier_timeout"),
            ("heartbeat_timeout", "barrier_timeout"),
            ("heartbeat_interval", "heartbeat_timeout"),
            ("monitor_process_interval", "soft_timeout"),
            ("monitor_thread_interval", "soft_timeout"),
            ("progress_watchdog_interval", "soft_timeout"),
        ):
            if not getattr(self, lower) < getattr(self, upper):
                raise ValueError(
                    f"{lower} must be shorter than {upper}, and they are "
                    f"{getattr(self, lower).total_seconds():g} s and "
                    f"{getattr(self, upper).total_seconds():g} s"
                )
        for name in ("monitor_process_logfile", "monitor_process_pidfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_absolute():
                raise ValueError(f"{name} must be an absolute path, and is {path}")


class CallWrapper:
    """One call of a wrapped function; passed to each parameter with this annotation."""

    def __init__(self, wrapper: Wrapper) -> None:
        global _calls  # noqa: PLW0603 - all ranks make the same calls in the same order
        if dist.is_initialized():
            raise ValueError(
                "the process group exists already: call init_process_group inside the wrapped "
                "function, which makes it anew after each restart"
            )
        _calls += 1
        self._number = _calls - 1
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.wrapper = wrapper
        self.state = State.from_env()
        self._prefix = f"everstep/inprocess/{attempt}/{_calls}"
        self._before = {name: environ.get(name) for name in ("RANK", "WORLD_SIZE", _AGENT_STORE)}
        watch_groups(functools.partial(_warn_of_timeout, wrapper.hard_timeout.total_seconds()))
        if self.state.initial_rank == 0 and torch.cuda.device_count() and dist.is_nccl_available():
            release = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            for text in nccl_check.troubles(environ, release, wrapper.hard_timeout.total_seconds()):
                warn(f"in-process restart: {text}", 0)
        self.base_store = wrapper.store_factory(**(wrapper.store_kwargs or {}))
        if getattr(self.base_store, "serves_function", False):
            # The ranks of the function meet at the same store, whichever has number 0.
            environ[_AGENT_STORE] = "True"
            environ.setdefault("TORCHELASTIC_RESTART_COUNT", attempt)
        self._call = IterationStore(self.base_store, self._prefix, self.state.world_size)
        self._interruptible = Interruptible()
        self._progress = Progress()
        self._monitor = MonitorLink(wrapper, self.state, self.base_store, self._call)

    @property
    def iteration(self) -> int:
        """The number of restarts so far."""
        return self.state.iteration

    def ping(self) -> None:
        """Note that the function makes progress; from then on it must ping in time."""
        self._progress.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that a restart does not interrupt."""
        while not self._interruptible.atomic_lock.acquire(timeout=_ATOMIC_POLL_S):
            continue  # a restart is under way, and ends this loop
        try:
            yield
        finally:
            self._interruptible.atomic_lock.release()

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A block that may take as long as it likes."""
        self._progress.is_paused = True
        self._monitor.send("pause")
        try:
            yield
        finally:
            self._progress.reset()
            self._progress.is_paused = False
            self._monitor.send("resume")

    def shutdown(self, *, is_failing: bool = False) -> None:
        """End the monitor process; the rank with the store first waits for the others.

        If this rank fails, the others may train on, and need the store; where an agent starts all
        ranks again, they do not.
        """
        starts_again = session()._link.starts_ranks  # noqa: SLF001 - the same package
        initial, size = self.state.initial_rank or 0, self.state.initial_world_size or 1
        within_s = self.wrapper.barrier_timeout.total_seconds()
        try:
            self._call.arrive(END, initial)
            if initial == 0 and not (is_failing and starts_again):
                self._monitor.send("pause")
                if is_failing:  # a rank that is gone with its monitor never comes
                    self._call.wait_for_the_living(END, 2 * within_s, size, session().heartbeat)
                else:
                    self._call.wait(END, within_s, size, session().heartbeat)
        except Exception as error:  # noqa: BLE001 - the training is over
            warn(f"the store of the in-process restarts ends early: {error}")
        self._monitor.close()
        for name, value in self._before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value

    def __enter__(self) -> "CallWrapper":
        return self

    def __exit__(self, kind: "type[BaseException] | None", *_: object) -> None:
        self.shutdown(is_failing=kind is not None)

    def __call__(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the function until all ranks have completed it; the result of this rank."""
        arguments, named = _with_call(fn, args, kwargs, self)
        _freeze_heap()
        shared = self._shared()
        hook = sys.excepthook
        try:
            self._assign(shared, set())
            while True:
                shared = self._shared()
                try:
                    result = self._iterate(shared, lambda: fn(*arguments, **named))
                except _Again:
                    self._assign(shared, shared.lost())
                    self.state.advance()
                    session().report("restarts_in_process", self.state.iteration)
                    sys.excepthook = hook  # each group that torch makes puts one more around it
                    gc.collect()
                    continue
                self._call_plugin(self.wrapper.completion)
                return result
        except BaseException:
            self._give_up(shared)
            raise

    def _shared(self) -> IterationStore:
        return IterationStore(
            self.base_store, f"{self._prefix}/{self.state.iteration}", self.state.world_size
        )

    def _assign(self, shared: IterationStore, lost: set[int]) -> None:
        """Give this rank its number for the next iteration."""
        context = RankAssignmentCtx(dataclasses.replace(self.state), shared, lost)
        self.state = self.wrapper.rank_assignment(context).state
        self.state.set_distributed_vars()

    def _iterate(self, shared: IterationStore, function: Callable[[], Any]) -> Any:
        """The function's result, if all ranks complete it; `_Again` if all ranks restart."""
        rank = self.state.rank
        assert rank is not None, "a rank without a number has ended"
        begin_groups(self._number * _MOST_ITERATIONS + self.state.iteration)
        self._monitor.begin(shared, f"{self._prefix}/{self.state.iteration}", rank)
        self._progress.reset()
        watch = IterationWatch(
            self, shared, self._interruptible, self._progress, self._monitor, self._call.beat
        )
        with watch:
            try:
                return self._interruptible.call(lambda: self._attempt(shared, rank, function))
            except RankShouldRestart:
                since = monotonic()
            except Exception as error:  # noqa: BLE001 - all ranks restart
                since = monotonic()
                if not shared.is_interrupted():  # else it follows from another rank's end
                    self.state.fn_exception = error
                    text = f"{type(error).__name__}: {error}"
                    perhaps = "perhaps because of another rank, " if _OF_PEER in text else ""
                    warn(f"{perhaps}{text}; all ranks restart in their processes", rank)
                    shared.interrupt(rank, "EXCEPTION")
                watch.await_abort()
        self._monitor.send("left")
        session().end_all()
        session().heartbeat()
        self._recover(shared, rank)
        if session().is_watched:
            self._report(shared, rank, monotonic() - since)
        raise _Again

    def _report(self, shared: IterationStore, rank: int, took_s: float) -> None:
        """Have the agent of the rank that was the first to interrupt record the restart.

        Of a lost rank its agent has seen the end: all tell theirs that they go on without it.
        """
        lost = sorted(shared.lost())
        if not lost and shared.first_to_interrupt() != rank:
            return
        error, waited_s = self.state.fn_exception, 0.0
        name = "" if lost or error is None else type(error).__name__
        reason = f"raised {name}: {error}"
        if lost:
            reason = "goes on without ranks that are gone"
        elif error is None:
            waited_s = self.wrapper.soft_timeout.total_seconds()
            reason = f"made no progress for {waited_s:g} s"
        fields = f'"waited_s":{waited_s!r},"took_s":{took_s:.3f},"reason":{quoted(reason)}'
        fields += f',"error_name":{quoted(name)}'
        fields += f',"is_without":true,"lost":{lost}' * bool(lost)
        session()._link.send("restarted", fields)  # noqa: SLF001 - the same package

    def _attempt(self, shared: IterationStore, rank: int, function: Callable[[], Any]) -> Any:
        """One attempt: the function, and the barrier that all ranks reach if all complete it."""
        self._call_plugin(self.wrapper.initialize)
        try:
            self._call_plugin(self.wrapper.health_check)
        except Exception as error:
            raise HealthCheckError(f"rank {rank} is not healthy: {error}") from error
        result = None
        if self.state.mode is Mode.ACTIVE:
            result = function()
            shared.complete()
        else:
            self._wait_in_reserve(shared)
        self._progress.reset()
        shared.arrive(DONE, rank)
        within_s = self.wrapper.completion_timeout.total_seconds()
        shared.wait(DONE, within_s, meanwhile=self._progress.reset)
        return result

    def _wait_in_reserve(self, shared: IterationStore) -> None:
        """Wait until the active ranks have completed the function, or this rank is needed."""
        while not shared.is_completed():
            self._progress.reset()
            _pause(self.wrapper.progress_watchdog_interval)

    def _recover(self, shared: IterationStore, rank: int) -> None:
        """Make this process ready, and wait for the other ranks."""
        self._call_plugin(self.wrapper.finalize)
        try:
            self._call_plugin(self.wrapper.health_check)
        except Exception as error:
            raise HealthCheckError(f"rank {rank} takes part in no restart: {error}") from error
        shared.arrive(AGAIN, rank)
        self._progress.reset()
        shared.wait(AGAIN, self.wrapper.barrier_timeout.total_seconds(), meanwhile=self._beat)

    def _beat(self) -> None:
        """Report that this rank waits for others, and does not stand still."""
        session().heartbeat()
        self._monitor.send("alive 0")

    def _give_up(self, shared: IterationStore) -> None:
        """Leave the restarts to the other ranks."""
        rank = self.state.rank
        try:
            if rank is not None and not shared.is_full(DONE):
                shared.lose(rank)
                shared.interrupt(rank, "BASE_EXCEPTION")
                shared.arrive(AGAIN, rank)
        except Exception as error:  # noqa: BLE001 - the store may be gone, too
            warn(f"the other ranks do not know that this one ends: {error}", rank)
        self._call_plugin(self.wrapper.terminate)

    def _call_plugin(self, plugin: "Callable[[FrozenState], FrozenState] | None") -> None:
        if plugin is not None:
            plugin(self.state.freeze())


class _Again(Exception):  # noqa: N818 - a step of the loop
    """All ranks have met: the next iteration begins."""


_OF_PEER = " by peer"
"""How gloo tells that a connection to another rank is gone."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ATOMIC_POLL_S = 0.05
_MOST_ITERATIONS = 10_000


def _warn_of_timeout(hard_timeout_s: float, made_group: Any, timeout: Any) -> None:
    devices = getattr(made_group[0], "_device_types", ()) if made_group else ()
    if timeout is not None and any(device.type == "cuda" for device in devices):
        trouble = nccl_check.of_group(timeout.total_seconds(), hard_timeout_s)
        if trouble:
            warn_once(trouble)


def _freeze_heap() -> None:
    """Exempt what exists before the function from collections: each restart makes a full one.

    That takes 85 ms with torch alone, on each rank. Ranks of the forge have done it already.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _pause(most: timedelta) -> None:
    import time

    time.sleep(min(0.1, most.total_seconds()))


def _with_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], call: CallWrapper
) -> "tuple[Sequence[Any], Mapping[str, Any]]":
    """The arguments, with the call for each parameter that is annotated with `CallWrapper`."""
    signature = inspect.signature(function)
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    hints = _hints(function)
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, parameter.annotation)
        if hint is CallWrapper or CallWrapper in typing.get_args(hint):
            bound.arguments[name] = call
    return bound.args, bound.kwargs


def _hints(function: Callable[..., Any]) -> "dict[str, Any]":
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - an annotation of the script cannot be evaluated
        return {}
