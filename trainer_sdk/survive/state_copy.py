"""A copy of a rank's state in another rank: what is sent, and how it is taken into the live state.

The donor sends a skeleton: the form of each tensor, and all other values as bytes that hold no
code. The receiver makes its state of that form, and fills its tensors.
"""

import os
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from everstep.hashing import Hasher
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.target import Target, fill, local, named
from trainer_sdk.checkpoint.restore.values import as_bytes, is_strided, read_value
from trainer_sdk.checkpoint.value_kinds import dtype_of
from trainer_sdk.numerics.snapshot import TrainingParts
from trainer_sdk.survive.agreement import CopyResult
from trainer_sdk.survive.peer_memory import MemoryToken, hash_memory, read_memory

State = MutableMapping[str, Any]


class TensorForm(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, as this rank has it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    is_equal: bool
    """Whether replicas must have the same: a parameter, or a state of an optimizer."""
    address: int
    """Where its bytes lie in the donor's memory."""


class Skeleton(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a donor sends before the tensors."""

    pid: int
    token: bytes
    token_address: int
    tensors: tuple[TensorForm, ...] = ()
    values: bytes = b""
    error: str = ""
    """Why there is nothing to copy."""


class Hashes:
    """The hashes of a copy, whose tensors come in the same order on both sides."""

    def __init__(self) -> None:
        self._equal, self._rest = Hasher(), Hasher()

    def of(self, form: TensorForm) -> Hasher:
        """The hash that covers this tensor."""
        return self._equal if form.is_equal else self._rest

    def add(self, form: TensorForm, tensor: Tensor) -> None:
        """Hash a contiguous tensor in the host's memory."""
        hash_memory(tensor.data_ptr(), tensor.nbytes, self.of(form))

    def result(self, values: bytes) -> CopyResult:
        """Of all tensors that were added, and the other values."""
        self._rest.update(values)
        return CopyResult(equal=self._equal.hexdigest(), rest=self._rest.hexdigest())


@dataclass(frozen=True, slots=True)
class Content:
    """The tensors of this rank's state in the host's memory, for others to copy."""

    skeleton: Skeleton
    tensors: tuple[Tensor, ...]
    token: MemoryToken | None

    @classmethod
    def of(cls, state: State) -> "Content":
        """What the state has now; it must stay as it is while others copy."""
        sent = _sent(state)
        values = Target(sent, is_form_known=True).values
        is_equal = _equal_keys(sent, values)
        raw = {key: local(value) for key, value in sorted(values.items()) if _is_raw(value)}
        tensors = tuple(tensor.cpu().contiguous() for tensor in raw.values())
        token = MemoryToken()
        skeleton = Skeleton(
            pid=os.getpid(),
            token=token.octets,
            token_address=token.address,
            tensors=tuple(
                TensorForm(
                    key=key,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    is_equal=key in is_equal,
                    address=tensor.data_ptr(),
                )
                for key, tensor in zip(raw, tensors, strict=True)
                if tensor.numel()
            ),
            values=as_bytes({k: v for k, v in values.items() if k not in raw}, "the state"),
        )
        return cls(skeleton, tuple(tensor for tensor in tensors if tensor.numel()), token)

    @classmethod
    def failed(cls, error: Exception) -> "Content":
        """Nothing, and why."""
        text = f"{type(error).__name__}: {error}"
        return cls(Skeleton(pid=0, token=b"", token_address=0, error=text), (), None)

    def result(self) -> CopyResult:
        """The hashes of what this rank has given."""
        if self.skeleton.error:
            return CopyResult(error=self.skeleton.error)
        hashes = Hashes()
        for form, tensor in zip(self.skeleton.tensors, self.tensors, strict=True):
            hashes.add(form, tensor)
        return hashes.result(self.skeleton.values)


class Receiver:
    """The state of this rank, in the form of a donor's, to be filled."""

    def __init__(self, state: State, skeleton: Skeleton) -> None:
        self._state = state
        self._skeleton = skeleton
        self._hashes = Hashes()
        sent = _sent(state)
        self._values: dict[str, Any] = read_value(skeleton.values, "the state")
        self._target = self._made(sent)
        self._sent = sent
        tensors = self._target.tensors
        self._forms = skeleton.tensors
        self._tensors = [local(tensors[form.key]) for form in self._forms]
        for form, tensor in zip(self._forms, self._tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (dtype_of(form.dtype), form.shape):
                raise UnfitError(
                    f"{form.key} is {form.dtype} {list(form.shape)} on the other rank, and "
                    f"{tensor.dtype} {list(tensor.shape)} here"
                )
        self._places = [
            tensor
            if tensor.device.type == "cpu" and tensor.is_contiguous()
            else torch.empty(form.shape, dtype=tensor.dtype, device="cpu")
            for form, tensor in zip(self._forms, self._tensors, strict=True)
        ]

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors and values."""
        return sum(tensor.nbytes for tensor in self._tensors) + len(self._skeleton.values)

    @property
    def places(self) -> list[Tensor]:
        """Contiguous tensors of the host to copy into, in the order of the skeleton."""
        return self._places

    def arrived(self, index: int) -> None:
        """Take what was copied into a place."""
        form, into, tensor = self._forms[index], self._places[index], self._tensors[index]
        self._hashes.add(form, into)
        if into is not tensor:
            fill(tensor, into)

    def read(self) -> None:
        """Copy all tensors from the memory of the donor's process."""
        pid = self._skeleton.pid
        for form, into, tensor in zip(self._forms, self._places, self._tensors, strict=True):
            read_memory(pid, form.address, into.data_ptr(), into.nbytes, self._hashes.of(form))
            if into is not tensor:
                fill(tensor, into)

    def finish(self) -> CopyResult:
        """Pass all to the objects of the state, and return the hashes of what has arrived."""
        live = self._target.tensors
        for key, value in self._values.items():
            if key in live:
                fill(live[key], value)
                self._target.loaded(key)
            else:
                self._target.put(key, value)
        for form in self._forms:
            self._target.loaded(form.key)
        self._target.finish()
        self._state.update(self._sent)
        return self._hashes.result(self._skeleton.values)

    def _made(self, sent: State) -> Target:
        """The live state in the donor's form; optimizers lose states of another form."""
        forms: dict[str, Any] = dict.fromkeys(self._values)
        forms |= {each.key: (dtype_of(each.dtype), each.shape) for each in self._skeleton.tensors}
        target = Target(sent, is_form_known=True)
        target.begin_with(forms)
        optimizers = target.optimizers
        unlike = {key.partition(".")[0] for key in _differing(target, forms)}
        if not unlike.isdisjoint(optimizers):
            for name in unlike & optimizers.keys():
                cast("dict[Any, Any]", optimizers[name].state).clear()
            target = Target(sent, is_form_known=True)
            target.begin_with(forms)
        if differing := _differing(target, forms):
            raise UnfitError(f"the other rank's state differs in {named(differing)}")
        return target


def _differing(target: Target, forms: Mapping[str, Any]) -> list[str]:
    """The keys that only a single rank has; tensors without elements are not sent."""
    own = target.values
    return sorted(
        key
        for key in own.keys() ^ forms.keys()
        if not (key in own and _is_raw(own[key]) and not local(own[key]).numel())
    )


def _sent(state: State) -> State:
    """The parts of a state that are not of each rank alone, as random states are."""
    return {name: part for name, part in state.items() if not getattr(part, "may_be_absent", False)}


def _is_raw(value: object) -> bool:
    return isinstance(value, Tensor) and is_strided(local(value))


def _equal_keys(state: State, values: Mapping[str, Any]) -> Collection[str]:
    """The keys of parameters, and of what optimizers keep of them."""
    parts = TrainingParts(state)
    places = {local(tensor).data_ptr() for tensor in parts.parameters()}
    of_optimizers = tuple(
        f"{name}." for name, part in state.items() if isinstance(part, torch.optim.Optimizer)
    )
    return {
        key
        for key, value in values.items()
        if _is_raw(value) and (key.startswith(of_optimizers) or local(value).data_ptr() in places)
    }
