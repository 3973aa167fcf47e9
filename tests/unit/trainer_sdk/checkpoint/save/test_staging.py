"""Which tensors are copied at once or later, and who waits for the copy."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.waiting import until
from trainer_sdk.checkpoint.save import staging
from trainer_sdk.checkpoint.save.staging import (
    ChangedError,
    OwnedTensors,
    Stager,
    Staging,
    TensorCopy,
    optimizers_in,
)


class Held:
    """A stager whose later copies wait for the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.over = threading.Event()
        self.error: Exception | None = None
        self.stager = Stager()
        copy_beside = staging._copy_in_background

        def wait(one: TensorCopy) -> None:
            self.go_on.wait(30)
            copy_beside(one)

        monkeypatch.setattr(staging, "_copy_in_background", wait)

    def stage(self, now: list[TensorCopy], later: list[TensorCopy]) -> None:
        def then(error: Exception | None) -> None:
            self.error = error
            self.over.set()

        one = Staging(later, then)
        self.stager.copy(now, one)
        self.stager.go_on(one)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Held(monkeypatch)
    yield made
    made.go_on.set()
    made.stager.close()


def copy_of(source: torch.Tensor) -> TensorCopy:
    return TensorCopy("w", source, torch.zeros_like(source), version=source._version)


def test_the_time_of_a_wait_for_a_copy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """If forward and backward hide the copy, no wait is reported (E7)."""
    held = Held(monkeypatch)
    waited: list[float] = []
    entered: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        entered.append("section")
        held.go_on.set()
        yield

    stager = Stager(waiting)
    for is_hidden in (False, True):
        done = threading.Event()
        one = Staging([copy_of(torch.ones(5))], lambda _, done=done: done.set())  # type: ignore[misc]
        one.waited = waited.append
        stager.copy([], one)
        stager.go_on(one)
        if is_hidden:
            assert done.wait(30)
        stager.settle()
        assert done.wait(30)
        assert (len(waited), entered) == (1, ["section"])
    assert waited[0] > 0
    stager.close()


def test_tensors_without_an_optimizer_are_copied_before_the_call_returns(held: Held) -> None:
    now, later = copy_of(torch.ones(5)), copy_of(torch.ones(5))
    held.stage([now], [later])
    assert now.target.sum() == 5
    assert later.target.sum() == 0
    held.go_on.set()
    assert held.over.wait(30)
    assert later.target.sum() == 5
    assert held.error is None


def test_an_optimizers_step_waits_until_its_tensors_are_copied(held: Held) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    held.stager.watch([optimizer])
    later = copy_of(weight.detach())
    held.stage([], [later])
    weight.grad = torch.ones(1000)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    assert not held.over.wait(0.05)
    assert weight.sum() == 1000, "the step waits"
    held.go_on.set()
    stepping.join()
    assert weight.sum() == 0
    assert later.target.sum() == 1000
    assert held.error is None


def test_every_thread_waits_in_which_an_optimizer_steps(held: Held) -> None:
    later = copy_of(torch.ones(1000))
    held.stage([], [later])
    present = held.stager._present
    assert present is not None
    waiting: Any = present.left._cond  # type: ignore[attr-defined]
    with ThreadPoolExecutor() as parallel:
        for _ in range(2):
            parallel.submit(held.stager.settle)
        try:
            until(lambda: len(waiting._waiters) == 2, "both wait")
        finally:
            held.go_on.set()


def test_a_change_before_the_optimizers_step_is_detected(held: Held) -> None:
    source = torch.ones(9)
    held.stage([], [copy_of(source)])
    source.add_(1)
    held.go_on.set()
    assert held.over.wait(30)
    assert "w was changed before the optimizer's step" in str(held.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("is_dense", [True, False])
def test_changes_that_torch_does_not_count_are_detected_in_the_copy(
    held: Held, dtype: torch.dtype, is_dense: bool
) -> None:
    kept = torch.full((200, 300), float("nan")).to(torch.float32)
    source = torch.zeros(200, 300).to(dtype)
    source = source if is_dense else source.t()
    held.stage([], [copy_of(kept), copy_of(source)])
    source.data.copy_(torch.ones(source.shape))
    assert source._version == 0
    held.go_on.set()
    assert held.over.wait(30)
    assert "was changed before the optimizer's step" in str(held.error)


def test_a_change_during_the_copy_is_detected_in_the_source(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copy_beside = torch.zeros(9), staging._copy_in_background

    def copy_and_change(one: TensorCopy) -> None:
        copy_beside(one)
        source.data.add_(1)

    monkeypatch.setattr(staging, "_copy_in_background", copy_and_change)
    held.go_on.set()
    held.stage([], [copy_of(torch.full((9,), float("nan"))), copy_of(source)])
    assert held.over.wait(30)
    assert isinstance(held.error, ChangedError)


def test_a_failed_copy_does_not_block_the_training(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_copy_in_background", lambda _: 1 // 0)
    held.stage([], [copy_of(torch.ones(9))])
    held.stager.settle()
    assert held.over.wait(30)
    assert isinstance(held.error, ZeroDivisionError)
    held.go_on.set()


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_dropped_staging_is_not_waited_for(held: Held, is_begun: bool) -> None:
    staging = Staging([copy_of(torch.ones(9))], lambda _: held.over.set())
    held.stager.copy([], staging)
    if is_begun:
        held.stager.go_on(staging)
    held.stager.drop(staging)
    held.go_on.set()
    held.stager.settle()
    held.stager.close()
    assert not held.over.is_set()


def test_the_next_save_waits_for_this_one(held: Held) -> None:
    first, second = copy_of(torch.ones(3)), copy_of(torch.ones(3))
    held.stage([], [first])
    held.go_on.set()
    held.stage([], [second])
    assert first.target.sum() == 3


def test_only_tensors_of_optimizers_are_copied_later() -> None:
    linear = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(one for one in model.parameters() if one is not linear.bias)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    owned = OwnedTensors()
    assert owned.add([optimizer]) == [optimizer]
    assert owned.add([optimizer]) == []

    def can_wait(tensor: torch.Tensor, key: str = "moment") -> bool:
        return owned.has(key, tensor)

    waits = {key for key, one in model.state_dict().items() if can_wait(one, key)}
    assert waits == {"0.weight", "1.weight", "1.bias"}
    assert can_wait(linear.weight.detach(), "0.weight"), "known from before"
    assert not can_wait(torch.ones(3, 3), "0.weight"), "another tensor has taken its place"
    moments = optimizer.state[linear.weight]
    assert can_wait(moments["exp_avg"])
    assert not can_wait(linear.weight.detach().clone())
    with torch.inference_mode():
        assert not can_wait(torch.ones(3))


def test_an_optimizer_that_the_training_drops_is_freed_and_owns_nothing() -> None:
    """A training that thaws layers makes a new optimizer each time."""
    weight = torch.nn.Parameter(torch.ones(10))
    owned, stager = OwnedTensors(), Stager()
    first: torch.optim.Optimizer | None = torch.optim.Adam([weight])
    assert first is not None
    stager.watch(owned.add([first]))
    assert owned.has("weight", weight.detach())
    gone = weakref.ref(first)
    first = None
    gc.collect()
    assert gone() is None
    assert owned.add([]) == []
    assert not owned.has("weight", weight.detach())
    stager.close()


class Wrapper(torch.optim.Optimizer):
    """A wrapper as in Accelerate: it is an optimizer only by its class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_objects_without_hooks_are_not_waited_for() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(10))])
    assert optimizers_in([inner, Wrapper(inner), torch.nn.Linear(1, 1)]) == [inner]


def test_tensors_that_are_not_contiguous_are_copied_by_value(held: Held) -> None:
    later = copy_of(torch.arange(12.0).view(3, 4).t())
    held.go_on.set()
    held.stage([], [later])
    assert held.over.wait(30)
    assert torch.equal(later.target, later.source)
