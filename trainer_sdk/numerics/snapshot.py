"""What a step can change before its optimizer steps: random states, buffers and gradients."""

import ctypes
import random
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer_sdk.numerics.replica_hash import local_part
from trainer_sdk.numerics.unsharded import unsharded_parameters, with_wrappers

GROUPS_MOST = 64
_TWISTER_WORDS, _MARK_WORDS = 625, 4
_KEY_BYTES = 4
"""Of a word of the key, and of the index before it."""
_TORCH_INDEX, _TORCH_STORED, _TORCH_HEAD = 16, 5016, 192
"""Where a state of torch has its index, as 8 bytes like each word of the key that follows, and then
the normal numbers in store; and within how many bytes of a generator the key begins."""
_SMALL = 1 << 16
"""Buffers with at most this many elements are always copied: kernels of BatchNorm change theirs
without a new version."""


class TrainingParts:
    """The modules, optimizers and gradient scalers of a training's state."""

    def __init__(self, state: object) -> None:
        parts = list(_parts(state, set()))
        modules = [part for part in parts if isinstance(part, nn.Module)]
        self.modules = with_wrappers(modules)
        self.optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        scalers = [part for part in parts if isinstance(part, torch.amp.GradScaler)]
        self.scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self.named = _named_parameters(modules, self.optimizers)
        """Each parameter once, by name."""
        self.groups, self.group_of = _groups(list(self.named))
        """The names of at most 64 groups of parameters, and the group of each parameter."""
        self.is_staged = False
        """Whether ranks may need each other's results in a step, as stages of a pipeline do."""
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = [
            (module._buffers, name)  # noqa: SLF001 - there is no public access by place
            for root in modules
            for module in root.modules()
            for name in module._buffers  # noqa: SLF001
        ]
        self.has_buffers = bool(self._buffers)
        self.no_gradients: Sequence[Tensor | None] = (None,) * len(self.named)
        self._present: list[Tensor | None] = []
        self._reused: _SmallBuffers | None = None
        self._large: dict[int, _LargeCopy] = {}

    def name_groups(self, groups: list[str]) -> None:
        """Use these names of groups, which contain the present ones."""
        places = [groups.index(name) for name in self.groups]
        self.group_of = {name: places[group] for name, group in self.group_of.items()}
        self.groups = groups

    def parameters(self) -> Iterable[Tensor]:
        """All parameters that may have a gradient."""
        return self.named.values()

    def local_parameters(self) -> list[tuple[int, Tensor]]:
        """The tensors on which autograd accumulates this rank's own gradients, with their group."""
        groups = {id(parameter): self.group_of[name] for name, parameter in self.named.items()}
        unsharded = unsharded_parameters(self.modules)
        tensors: dict[int, tuple[int, Tensor]] = {}
        for parameter in self.named.values():
            local = unsharded.get(id(parameter), parameter)
            if local.requires_grad:
                tensors.setdefault(id(local), (groups[id(parameter)], local))
        return list(tensors.values())

    def buffers(self, *, again: bool = False) -> "list[KeptBuffer]":
        """The buffers as they are now, copied; `again` into the copies of the last such call."""
        present = [owner.get(name) for owner, name in self._buffers]
        if not again or not self._reused or any(map(is_not, present, self._present)):
            kept: list[KeptBuffer] = [
                (owner, name, tensor, torch.empty_like(tensor), None)
                for (owner, name), tensor in zip(self._buffers, present, strict=True)
                if tensor is not None and tensor.numel() <= _SMALL
            ]
            by_kind: defaultdict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for _, _, tensor, copy, _ in kept:
                by_kind[tensor.device, tensor.dtype].append((copy, tensor.detach()))
            small = _SmallBuffers(
                kept, [tuple(zip(*pairs, strict=True)) for pairs in by_kind.values()]
            )
            if again:
                self._present, self._reused = present, small
        else:
            small = self._reused
        for copies, tensors in small.copied:
            torch._foreach_copy_(copies, tensors)
        large = [
            (owner, name, tensor, *self._large_copy(tensor))
            for (owner, name), tensor in zip(self._buffers, present, strict=True)
            if tensor is not None and tensor.numel() > _SMALL
        ]
        return small.kept + large

    def _large_copy(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """The copy, and its version; None if the tensor also changes without a new version."""
        kept, version = self._large.get(id(tensor)), tensor._version  # noqa: SLF001
        if kept is None or kept.tensor is not tensor:
            kept = self._large[id(tensor)] = _LargeCopy(tensor, version, tensor.detach().clone())
        elif kept.version == version and kept.is_tracked is None:  # once, as it waits for a device
            kept.is_tracked = torch.equal(kept.copy, tensor)
        if kept.version != version or kept.is_tracked is False:
            kept.version, kept.copy = version, tensor.detach().clone()
        return kept.copy, None if kept.is_tracked is False else version


@dataclass(slots=True)
class _LargeCopy:
    """A copy of a large buffer, for as long as the buffer has the same version."""

    tensor: Tensor
    version: int
    copy: Tensor
    is_tracked: bool | None = None
    """Whether all changes make a new version, unlike those of `buffer.data`; None at first."""


KeptBuffer = tuple[dict[str, Tensor | None], str, Tensor, Tensor, int | None]
"""Where the buffer is, its name, itself, the copy, and the version that needs not be put back."""


class _SmallBuffers(NamedTuple):
    """Buffers that are copied each time, and the same by device and type."""

    kept: list[KeptBuffer]
    copied: list[Any]


class RandomStates:
    """The states of the generators of Python, numpy, torch and the current CUDA device."""

    __slots__ = ("cuda", "numpy", "python", "torch")

    def __init__(self) -> None:
        self.python = _PYTHON.state()
        self.torch = _TORCH.state()[0]
        self.numpy = _numpy_state()
        is_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.cuda = torch.cuda.get_rng_state() if is_cuda else None

    def put_back(self) -> None:
        """Continue from these states."""
        _LAST.states = None
        for twister in (_PYTHON, _TORCH, _numpy):
            if twister is not None:
                twister.forget()  # a normal number in store is not part of its mark
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class _Twister:
    """A Mersenne Twister whose state is asked for only when it has moved.

    To ask for it makes 625 numbers, and costs more than the rest of a snapshot. So the generator's
    memory is looked at: each draw changes the index, and each 624th all words of the key. Where
    the memory is not as expected, or a normal number is in store, which can be drawn without a
    move of the generator, the state is asked for each time.
    """

    def __init__(
        self, owner: object, address: int, index: int, read: Callable[[], Any], words: list[int]
    ) -> None:
        self.owner = owner
        """Keeps the memory."""
        memory = memoryview((ctypes.c_uint32 * _TWISTER_WORDS).from_address(address)).cast("B")
        self._is_known = memory.cast("I").tolist() == words
        begin = _KEY_BYTES * max(index - _MARK_WORDS + 1, 0)
        self.marked = memory[begin : begin + _KEY_BYTES * _MARK_WORDS]
        """The index, and the words next to it."""
        self.mark = b""
        """What these were when the state was asked for; empty if they do not tell."""
        self._read = read
        self._state: Any = None

    def state(self) -> Any:
        """The state now."""
        mark = self.marked.tobytes()
        if mark != self.mark:
            self._state = self._read()
            self.mark = mark if self._is_known and not self._state[-1] else b""
        return self._state

    def forget(self) -> None:
        """Ask for the state the next time."""
        self.mark = b""


class _LastStates:
    """The states of the last time, which serve again while no generator has moved."""

    def __init__(self) -> None:
        self.states: RandomStates | None = None
        self._marked: Sequence[memoryview] = ()
        self._marks = b""
        self._owner: object = None

    def again(self) -> RandomStates:
        """The states now."""
        states = self.states
        if (
            states is None
            or b"".join(self._marked) != self._marks
            or _numpy_random._bit_generator is not self._owner  # noqa: SLF001
            or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        ):
            states = RandomStates()
            twisters = [twister for twister in (_PYTHON, _TORCH, _numpy) if twister is not None]
            self._marked = [twister.marked for twister in twisters]
            self._marks = b"".join(twister.mark for twister in twisters)
            self._owner = getattr(_numpy, "owner", None)
            self.states = states if _numpy is not None else None  # it may be imported later
        return states


def _python_twister() -> _Twister:
    """That of the module `random`: in memory, the index comes first."""
    owner: Any = random._inst  # noqa: SLF001 - there is no other way
    *key, index = random.getstate()[1]
    address = id(owner) + object.__basicsize__
    return _Twister(owner, address, 0, random.getstate, [index, *key])


def _torch_twister() -> _Twister:
    """That of torch on the CPU: its index comes before the key, somewhere in its generator."""
    owner: Any = torch.default_generator
    state = _torch_state()[0].numpy().tobytes()
    index, *key = struct.unpack_from(f"{_TWISTER_WORDS}Q", state, _TORCH_INDEX)
    octets = ctypes.string_at(owner._cdata, _TORCH_HEAD)  # noqa: SLF001 - there is no other way
    at = max(octets.find(struct.pack("4I", *key[:4])) - _KEY_BYTES, 0)
    return _Twister(owner, owner._cdata + at, 0, _torch_state, [index, *key])  # noqa: SLF001


def _torch_state() -> tuple[Tensor, bool]:
    """The state, and whether a normal number is in store."""
    state = torch.default_generator.get_state()
    stored = ctypes.string_at(state.data_ptr() + _TORCH_STORED, len(state) - _TORCH_STORED)
    return state, any(stored)


_LAST = _LastStates()
random_states = _LAST.again
_PYTHON = _python_twister()
_TORCH = _torch_twister()
_numpy: _Twister | None = None
_numpy_random: Any = None
"""The object whose methods are the functions of `numpy.random`."""


def _numpy_state() -> Any:
    """That of numpy, which may be imported later, and whose generator may be replaced."""
    global _numpy, _numpy_random  # noqa: PLW0603 - like the generator
    if _numpy is not None and _numpy_random._bit_generator is _numpy.owner:  # noqa: SLF001
        return _numpy.state()
    if "numpy" not in sys.modules:
        return None
    random_of: Any = sys.modules["numpy"].random
    _numpy_random = getattr(random_of.mtrand, "_rand", None)
    owner = getattr(_numpy_random, "_bit_generator", None)
    if not isinstance(owner, random_of.MT19937):
        return random_of.get_state()
    _, key, index, *_ = random_of.get_state()
    words = [*key.tolist(), index]
    address = owner.ctypes.state_address
    _numpy = _Twister(owner, address, _TWISTER_WORDS - 1, random_of.get_state, words)
    return _numpy.state()


class Snapshot:
    """The state of a step between two of its parts; parameters and optimizers are not in it.

    The one of a step that begins is taken `again` and again: the last such one is overwritten.
    """

    def __init__(
        self, parts: TrainingParts, parameters: list[Tensor], *, again: bool = False
    ) -> None:
        self.random = random_states()
        self.buffers = parts.buffers(again=again) if parts.has_buffers else []
        self._parameters = parameters
        self.gradients: Sequence[Tensor | None] = parts.no_gradients
        for parameter in parameters:
            if parameter.grad is not None:
                self.gradients = _copied([parameter.grad for parameter in parameters])
                break

    def put_back(self) -> None:
        """Make everything as it was."""
        self.random.put_back()
        self.put_back_tensors()

    @torch.no_grad()
    def put_back_tensors(self) -> None:
        """Make buffers and gradients as they were."""
        put_back_buffers(self.buffers)
        for parameter, gradient in zip(self._parameters, self.gradients, strict=True):
            present = parameter.grad
            if gradient is None or present is None or present.shape != gradient.shape:
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            else:
                present.copy_(gradient)  # it may be a view of a bucket of DDP


@torch.no_grad()
def put_back_buffers(buffers: list[KeptBuffer]) -> None:
    """Make buffers as they were when they were copied."""
    for owner, name, tensor, copy, version in buffers:
        if tensor._version != version:  # noqa: SLF001
            tensor.copy_(copy)
        owner[name] = tensor


def _copied(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Copies of gradients; in the host's memory where the device has no room for them."""
    sizes = [
        0 if gradient is None or not gradient.is_cuda else local(gradient).nbytes
        for gradient in gradients
    ]
    place: str | None = None
    if sum(sizes):
        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        # Running again needs as much once more, for its own gradients.
        place = "cpu" if 2 * sum(sizes) > free else None
    return [
        None
        if gradient is None
        else gradient.detach().clone()
        if place is None
        else gradient.detach().to(place)
        for gradient in gradients
    ]


def local(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor on this rank; the values of a sparse one."""
    tensor = local_part(tensor)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor.detach()


def _parts(value: object, seen: set[int]) -> Iterator[object]:
    """Modules, optimizers and scalers in mappings and lists."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _parts(part, seen)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part, seen)


def _named_parameters(
    modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for number, module in enumerate(modules):
        before = f"{number}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[before + name] = parameter
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(cast("list[Any]", group["params"])):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[f"optimizer.{number}.{index}"] = parameter
    return named


def _groups(names: list[str]) -> tuple[list[str], dict[str, int]]:
    """Group parameters by the longest prefix of their names that gives at most 64 groups."""
    deepest = max((name.count(".") for name in names), default=0)
    for depth in range(deepest + 1, 0, -1):
        prefixes = {name: ".".join(name.split(".")[:depth]) for name in names}
        groups = list(dict.fromkeys(prefixes.values()))
        if len(groups) <= GROUPS_MOST:
            return groups, {name: groups.index(prefixes[name]) for name in names}
    each = -(-len(names) // GROUPS_MOST)
    groups = names[::each]
    return groups, {name: index // each for index, name in enumerate(names)}
