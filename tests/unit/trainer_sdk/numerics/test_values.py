"""Values on a GPU are read once they have arrived, in the order of steps."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from trainer_sdk.numerics import values
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.values import LateMetrics, StepReader
from trainer_sdk.rank_session import session
from trainer_sdk.testing import watched
from trainer_sdk.wire import NumericsReported


class OnDevice(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device: Any = "cuda:0"


class OnAnother(OnDevice):
    """On the second GPU."""

    device = "cuda:1"


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


def on_device(value: float, kind: type[OnDevice] = OnDevice) -> Any:
    return torch.tensor(value).as_subclass(kind)


def test_values_arrive_in_the_order_of_steps() -> None:
    reader = StepReader(waits=False)
    for step in (1, 2):
        assert reader.read(step, on_device(step + 0.5), None, 0.1) == []
        assert reader.is_late
    assert Event.made[0].stream == "stream of cuda:0", "of the value's device, not of the present"
    Event.made[1].is_over = True
    assert reader.arrived() == []
    Event.made[0].is_over = True
    assert [(one.step, one.loss, one.lr) for one in reader.arrived()] == [
        (1, 1.5, 0.1),
        (2, 2.5, 0.1),
    ]


def test_a_norm_on_another_gpu_than_the_loss_is_waited_for_there() -> None:
    """As of a model that one process has on two GPUs."""
    reader = StepReader(waits=False)
    assert reader.read(1, on_device(1.5), on_device(2.0, OnAnother), None) == []
    events = {event.stream: event for event in Event.made}
    assert sorted(events) == ["stream of cuda:0", "stream of cuda:1"]
    events["stream of cuda:0"].is_over = True
    assert reader.arrived() == []
    events["stream of cuda:1"].is_over = True
    assert [one.grad_norm for one in reader.arrived()] == [2.0]


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


def test_metrics_on_a_gpu_are_shown_once_they_have_arrived() -> None:
    shown: list[tuple[str, float]] = []
    metrics = LateMetrics(lambda name, value: shown.append((name, value)))
    metrics.show({"loss": on_device(1.0), "rate": 0.5, "epoch": torch.tensor(0.0)})
    assert shown == [("rate", 0.5), ("epoch", 0.0)]
    metrics.show({"loss": on_device(2.0)})  # the first one is still on its way
    Event.made[0].is_over = True
    metrics.show({"loss": on_device(3.0)})
    Event.made[1].is_over = True
    metrics.show({})
    assert shown[2:] == [("loss", 1.0), ("loss", 3.0)]


def test_a_rank_alone_decides_on_late_values_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Event, "query", lambda _: True)
    with watched() as watch:
        training = Numerics(session(), {"model": nn.Linear(1, 1)})
        for loss in (1.0, float("nan"), 1.0, 1.0):
            assert training.accepts(loss=on_device(loss))
            session().step()
    suspected = [
        message.body["step"] for message in watch.messages if isinstance(message, NumericsReported)
    ]
    assert suspected == [2]
