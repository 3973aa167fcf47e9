"""NVRx's states that know their tensors: `TensorAwareStateDict`, `BasicTensorAwareStateDict`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out, so that the rest can be sent by itself."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out: the state is hollow then."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors of a state that is not hollow."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into a hollow state, in the order of `pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put empty tensors into a hollow state."""

    def values(self) -> ValuesView[Any]:
        """The values of the state's own fields."""
        return vars(self).values()

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to their devices."""


class TensorPlaceholder:
    """The place of a tensor that was taken out."""

    def __init__(self, ten: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = ten.shape, ten.dtype, ten.device

    def init_tensor(self) -> torch.Tensor:
        """An empty tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A dict with tensors in nested dicts and lists; they may be on any device."""

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: list[torch.device] | None = None
        """Where the tensors were, while copies of them are on the CPU."""

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""
        return self._is_hollow

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of a state that is not hollow."""
        self._must_be(hollow=False)
        return (value for value in nested_values(self.state_dict) if _is_tensor(value))

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out: the state is hollow then."""
        tensors = list(self.tensors)
        self._replace(lambda value: TensorPlaceholder(value) if _is_tensor(value) else value)
        self._is_hollow = True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors into a hollow state, in the order of `pop_tensors`."""
        self._must_be(hollow=True)
        tensors = list(tensor_data)
        places = sum(
            isinstance(value, TensorPlaceholder) for value in nested_values(self.state_dict)
        )
        if len(tensors) != places:
            raise ValueError(f"the state has places for {places} tensors, and {len(tensors)} came")
        following = iter(tensors)
        self._replace(
            lambda value: next(following) if isinstance(value, TensorPlaceholder) else value
        )
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put empty tensors into a hollow state."""
        self._must_be(hollow=True)
        self._replace(
            lambda value: value.init_tensor() if isinstance(value, TensorPlaceholder) else value
        )
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace the tensors by copies on the CPU; `restore_tensor_device` undoes it."""
        self._devices = [tensor.device for tensor in self.tensors]

        def copied(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            if value.device.type == "cpu":
                return value.detach().clone()
            return value.detach().to("cpu", non_blocking=non_blocking)

        self._replace(copied)

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move the tensors back to the devices where they were."""
        self._must_be(hollow=False)
        if self._devices is None:
            return
        devices = iter(self._devices)

        def moved(value: Any) -> Any:
            if not _is_tensor(value):
                return value
            device = next(devices)
            # The rank may have another device than the one that has saved.
            where = device if device.type == "cpu" else torch.device(device.type)
            return value.to(where, non_blocking=non_blocking)

        self._replace(moved)
        self._devices = None

    def to_state_dict(self) -> dict[Any, Any]:
        """The dict."""
        self._must_be(hollow=False)
        return self.state_dict

    def _replace(self, change: Callable[[Any], Any]) -> None:
        dict_list_map_inplace(change, self.state_dict)

    def _must_be(self, *, hollow: bool) -> None:
        if self._is_hollow is not hollow:
            raise RuntimeError(
                "the tensors of this state were taken out: insert_tensors puts them back"
                if self._is_hollow
                else "the tensors of this state are in it: pop_tensors takes them out"
            )


def nested_values(x: Any) -> Iterator[Any]:
    """The values in nested dicts and lists."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, (dict, list)):
            yield from nested_values(value)
        else:
            yield value


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each value in nested dicts and lists."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
        return x
    if isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
        return x
    return f(x)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
