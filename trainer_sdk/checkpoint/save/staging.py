"""Copies a state into an arena: at once, or while the training runs until an optimizer's next step.

A tensor that only an optimizer changes stays the same from `save` until the optimizer's next step.
So it can be copied while forward and backward run, if the optimizer waits for the rest of the copy.
Other changes are detected by torch's count of changes, and, as torch does not count all changes, by
samples of the values.
"""

import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from time import monotonic
from typing import Any

import torch

_PIECE_BYTES = 32 << 20
OnCopied = Callable[[int], None]
"""Called with the end of the filled part of the arena."""


WaitContext = Callable[[], AbstractContextManager[object]]
"""The context in which the training waits for a copy."""
POINTS = 16
"""The number of samples of a tensor, from its first value to about its last."""
SMALL_BYTES = 32 << 10
"""Up to this size a tensor is copied as fast as it is sampled."""
_JOINED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128}
)
"""The types that torch can join on every device; tensors of other types are sampled as bytes."""


class OwnedTensors:
    """The tensors that only optimizers change. It holds the optimizers weakly."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []
        self._known: dict[str, tuple[int, bool]] = {}
        """For each key, the address of the tensor at the last call, and the answer."""
        self._storages: set[int] | None = None

    def add(self, optimizers: Iterable[Any]) -> list[Any]:
        """Add optimizers; returns the new ones."""
        alive = self._alive()
        new = [
            optimizer for optimizer in optimizers if not any(optimizer is other for other in alive)
        ]
        if new or len(alive) < len(self._optimizers):
            self._known.clear()  # an address may belong to another tensor by now
        self._optimizers = [weakref.ref(optimizer) for optimizer in (*alive, *new)]
        self._storages = None
        return new

    def has(self, key: str, source: torch.Tensor) -> bool:
        """Whether an optimizer owns a tensor, and torch counts other changes of it."""
        address = source.data_ptr()
        before = self._known.get(key)
        if before is not None and before[0] == address:
            return before[1]
        if self._storages is None:
            self._storages = _storages_of(self._alive())
        is_owned = not source.is_inference() and _storage(source) in self._storages
        self._known[key] = address, is_owned
        return is_owned

    def _alive(self) -> list[Any]:
        return [
            optimizer for reference in self._optimizers if (optimizer := reference()) is not None
        ]


def _storages_of(optimizers: Iterable[Any]) -> set[int]:
    storages: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            storages.update(_storage(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            storages.update(
                _storage(value) for value in state.values() if isinstance(value, torch.Tensor)
            )
    return storages


def optimizers_in(state: Iterable[object]) -> list[Any]:
    """The optimizers among these objects; not wrappers that do not accept hooks."""
    return [part for part in state if _takes_hooks(part)]


def _takes_hooks(part: Any) -> bool:
    try:
        part.register_step_pre_hook(_nothing).remove()
    except AttributeError:
        return False
    return True


def _nothing(*_: object) -> None:
    """Do nothing, as a hook."""


def _storage(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


class Samples:
    """Sampled values of some tensors, all on one device and larger than `SMALL_BYTES`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._numbers: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self._numbers.setdefault(tensor.dtype, []).append(number)
        with torch.no_grad():
            self._values = {
                kind: torch.cat([_some(tensors[number]) for number in numbers])
                for kind, numbers in self._numbers.items()
            }

    def go_to_host(self, stream: torch.cuda.Stream) -> None:
        """Copy the samples to the host, in this stream, which is the current one."""
        for kind, values in self._values.items():
            values.record_stream(stream)
            self._values[kind] = values.to("cpu", non_blocking=True)

    def first_other(self, other: "Samples") -> int | None:
        """The number of the first tensor whose samples differ, bit by bit. Both are on the host."""
        for kind, numbers in self._numbers.items():
            ours, theirs = (
                samples._values[kind].view(torch.uint8).view(len(numbers), -1)  # noqa: SLF001 - ours
                for samples in (self, other)
            )
            if not torch.equal(ours, theirs):
                return numbers[int((ours != theirs).any(1).nonzero()[0])]
        return None


def _some(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor if tensor.dtype in _JOINED else tensor.view(torch.uint8)
    step = (values.numel() - 1) // (POINTS - 1)
    if values.is_contiguous():
        return values.as_strided((POINTS,), (step,))
    at = torch.arange(POINTS, device=values.device) * step
    return values[torch.unravel_index(at, values.shape)]


class ChangedError(Exception):
    """A tensor was changed while it was being copied."""


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor, and the target of its copy."""

    key: str
    source: torch.Tensor
    target: torch.Tensor
    """A tensor of the source's type and shape, in the arena."""
    begin: int = 0
    """The offset of the target in the arena."""
    version: int = 0
    """torch's count of changes of the source when the save began."""

    @property
    def end(self) -> int:
        """The end of the target in the arena."""
        return self.begin + self.source.nbytes


@dataclass(slots=True)
class DeviceCopies:
    """The tensors of a device that are copied later, and samples that reveal changes."""

    copies: Sequence[TensorCopy]
    before: Samples
    """Samples of the sources, at the call of `save`."""
    after: Samples | None = None
    """Samples of the sources, once they are copied."""


@dataclass(slots=True)
class Staging:
    """A state that is being copied into the arena."""

    later: Sequence[TensorCopy]
    finish: Callable[[Exception | None], None]
    """Called by another thread when all is copied, with the error if there is one."""
    copied: OnCopied = lambda _: None
    """Called while the host copies, in the order of the arena."""
    waited: Callable[[float], None] = lambda _: None
    """Called with the time that the training has waited for the copy."""
    events: list[Any] = field(default_factory=list)
    """The events of GPU copies."""
    watched: list[DeviceCopies] = field(default_factory=list)
    is_dropped: bool = False
    """Whether the save has failed: then `finish` is not called."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set once the host has read all tensors of the training."""
    is_checked: bool = False
    error: Exception | None = None


class Stager:
    """Copies tensors: some at once, the others in a separate thread."""

    def __init__(self, waiting: WaitContext = nullcontext) -> None:
        self._waiting = waiting
        self._work: queue.SimpleQueue[Staging | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._present: Staging | None = None
        self._checking = threading.Lock()
        self._hooks: list[Any] = []
        self._streams: dict[torch.device, Any] = {}
        _stagers.add(self)

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Have the next step of these optimizers wait until their tensors are copied."""
        _watch_graphs()
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers
        ]

    def copy(self, now: Sequence[TensorCopy], staging: Staging) -> None:
        """Copy the tensors of `now`, and remember those of `staging.later`."""
        self.settle()
        self._present = staging
        for copy in now:
            if not copy.source.is_cpu:
                continue
            for piece in _pieces(copy):
                piece.target.copy_(piece.source)
                if not staging.later:
                    staging.copied(piece.end)
        staging.watched = _by_device(staging.later)
        for copies in _on_gpus(now):
            event = self._on_device(copies)
            torch.cuda.current_stream(event.device).wait_event(
                event
            )  # only the stream waits, not the host
            staging.events.append(event)
        for watched in staging.watched:
            if not _is_on_host(watched):
                staging.events.append(self._on_device(watched.copies, watched))

    def go_on(self, staging: Staging) -> None:
        """Begin to copy the rest in the thread, and return."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-stage", daemon=True)
            self._thread.start()
        self._work.put(staging)

    def drop(self, staging: Staging) -> None:
        """Abandon a staging, at any point."""
        staging.is_dropped = True
        self.go_on(staging)  # the thread wakes those who wait for it

    def settle(self) -> None:
        """Wait until the saved tensors may be changed."""
        staging = self._present
        if staging is None:
            return
        for event in staging.events:
            torch.cuda.current_stream(event.device).wait_event(event)
        if not staging.left.is_set():
            began = monotonic()
            with self._waiting():
                staging.left.wait()
            staging.waited(monotonic() - began)
        self._check_devices(staging)
        if self._present is staging:  # other threads may wait for it until now
            self._present = None

    def before_capture(self) -> None:
        """Wait until the saved tensors may be changed, by the host: a capture must not wait."""
        for event in [] if self._present is None else self._present.events:
            event.synchronize()
        self.settle()

    def close(self) -> None:
        """Stop copying."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _before_step(self, *_: object) -> None:
        self.settle()

    def _run(self) -> None:
        while (staging := self._work.get()) is not None:
            if not staging.is_dropped:
                try:
                    self._copy_later(staging)
                except Exception as error:  # noqa: BLE001 - the training waits for this thread, so it must not die
                    staging.error = error
            staging.left.set()
            if not staging.is_dropped:
                staging.finish(staging.error)

    def _copy_later(self, staging: Staging) -> None:
        for watched in filter(_is_on_host, staging.watched):
            for copy in watched.copies:
                for piece in _pieces(copy):
                    _copy_in_background(piece)
                    staging.copied(piece.end)
            watched.after = Samples([copy.source for copy in watched.copies])
            staging.error = _recounted(watched.copies) or _resampled(watched)
        staging.left.set()
        for event in staging.events:
            event.synchronize()
        self._check_devices(staging)
        for watched in staging.watched:
            if staging.error is None and not _is_on_host(watched):
                staging.error = _resampled(watched)

    def _check_devices(self, staging: Staging) -> None:
        """Check torch's counts, before an optimizer's step changes them."""
        with self._checking:
            if not staging.is_checked:
                staging.is_checked = True
                others = [copy for copy in staging.later if not copy.source.is_cpu]
                staging.error = staging.error or _recounted(others)

    def _on_device(self, copies: Sequence[TensorCopy], watched: DeviceCopies | None = None) -> Any:
        """Have a GPU copy in a separate stream, after all work that it was given so far."""
        device = copies[0].source.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
                copy.source.record_stream(stream)
            if watched is not None:
                watched.after = Samples([copy.source for copy in copies])
                watched.after.go_to_host(stream)
                watched.before.go_to_host(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


_stagers: "weakref.WeakSet[Stager]" = weakref.WeakSet()


def _let_go() -> None:
    """Stop all stagers in a forked child, which copies nothing."""
    for stager in _stagers:
        stager._present = stager._thread = None  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_let_go)


def _watch_graphs() -> None:
    """Have CUDA graphs wait as optimizers do: a replay changes tensors, and calls no hook."""
    for name, wait in (("capture_begin", Stager.before_capture), ("replay", Stager.settle)):
        method = getattr(torch.cuda.CUDAGraph, name)
        if not hasattr(method, "waits_for_saves"):
            setattr(torch.cuda.CUDAGraph, name, _waiting(method, wait))


def _waiting(method: Callable[..., Any], wait: Callable[[Stager], None]) -> Callable[..., Any]:
    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        for stager in list(_stagers):
            wait(stager)
        return method(*arguments, **named)

    run.waits_for_saves = True  # type: ignore[attr-defined]
    return run


def _on_gpus(copies: Sequence[TensorCopy]) -> list[list[TensorCopy]]:
    by_device: dict[torch.device, list[TensorCopy]] = {}
    for copy in copies:
        if not copy.source.is_cpu:
            by_device.setdefault(copy.source.device, []).append(copy)
    return list(by_device.values())


def _by_device(copies: Sequence[TensorCopy]) -> list[DeviceCopies]:
    on_host = [copy for copy in copies if copy.source.is_cpu]
    each = [*([on_host] if on_host else []), *_on_gpus(copies)]
    return [DeviceCopies(some, Samples([copy.source for copy in some])) for some in each]


def _is_on_host(watched: DeviceCopies) -> bool:
    return watched.copies[0].source.is_cpu


def _recounted(copies: Sequence[TensorCopy]) -> ChangedError | None:
    """An error if torch has counted a change."""
    for copy in copies:
        if copy.source._version != copy.version:  # noqa: SLF001 - torch has no public name for it
            return _changed(copy)
    return None


def _resampled(watched: DeviceCopies) -> ChangedError | None:
    """An error if sampled values differ in the copy, or have changed in the source since."""
    copied = Samples([copy.target for copy in watched.copies])
    for now in (copied, watched.after):
        number = None if now is None else watched.before.first_other(now)
        if number is not None:
            return _changed(watched.copies[number])
    return None


def _changed(copy: TensorCopy) -> ChangedError:
    return ChangedError(
        f"{copy.key} was changed before the optimizer's step, while it was being copied: "
        "lazy=False copies it at once, as all later saves do"
    )


def _pieces(copy: TensorCopy) -> Iterator[TensorCopy]:
    """Split a large tensor, so that progress is reported."""
    is_plain = type(copy.source) in (torch.Tensor, torch.nn.Parameter)
    if copy.source.nbytes <= _PIECE_BYTES or not (is_plain and copy.source.is_contiguous()):
        yield copy
        return
    count, each = _PIECE_BYTES // copy.source.itemsize, copy.source.itemsize
    sources, targets = (torch.split(whole.view(-1), count) for whole in (copy.source, copy.target))
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        yield TensorCopy(copy.key, source, target, copy.begin + number * count * each)


def _copy_in_background(copy: TensorCopy) -> None:
    """Copy with a single thread and without the GIL, which leaves the cores to the training."""
    if copy.source.is_contiguous():
        ctypes.memmove(copy.target.data_ptr(), copy.source.data_ptr(), copy.source.nbytes)
    else:
        copy.target.copy_(copy.source)
