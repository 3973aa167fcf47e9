"""Values on a GPU are read once they have arrived, in the order of steps."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from trainer_sdk.numerics import values
from trainer_sdk.numerics.values import StepReader


class OnDevice(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Event:
    """An event of a device that is at work."""

    made: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.is_over = False
        self.made.append(self)

    def record(self, stream: Any) -> None:
        """The device will come to it."""
        self.stream = stream

    def query(self) -> bool:
        """Whether it has."""
        return self.is_over


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(values, "_copied", lambda value: value.detach().clone())


def on_device(value: float) -> Any:
    return torch.tensor(value).as_subclass(OnDevice)


def test_values_arrive_in_the_order_of_steps() -> None:
    reader = StepReader(waits=False)
    for step in (1, 2):
        assert reader.read(step, on_device(step + 0.5), None, 0.1) == []
        assert reader.is_late
    assert Event.made[0].stream == "stream of cpu"  # of the value's device, not of the present one
    Event.made[1].is_over = True
    assert reader.arrived() == []
    Event.made[0].is_over = True
    assert [(one.step, one.loss, one.lr) for one in reader.arrived()] == [
        (1, 1.5, 0.1),
        (2, 2.5, 0.1),
    ]


def test_a_script_may_wait_for_them() -> None:
    reader = StepReader(waits=True)
    (arrived,) = reader.read(1, on_device(1.5), 2.0, None)
    assert (arrived.loss, arrived.grad_norm) == (1.5, 2.0)
    assert not reader.is_late
    assert not Event.made


def test_what_has_not_arrived_is_forgotten_once_the_training_has_gone_back() -> None:
    reader = StepReader(waits=False)
    reader.read(1, on_device(1.0), None, None)
    reader.forget()
    assert [one.loss for one in reader.read(1, 2.0, None, None)] == [2.0]
