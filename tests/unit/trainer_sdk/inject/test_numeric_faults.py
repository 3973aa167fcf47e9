"""Each fault in what a rank computes changes the value that its name promises, and no other."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.modules import module as hooks
from torch.utils.data import DataLoader, TensorDataset, dataloader

from trainer_sdk.inject import numeric_faults
from trainer_sdk.inject.catalog import fault_request

FEATURES = 4
Step = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def _without_hooks_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = dataloader._BaseDataLoaderIter.__next__
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", own)
    yield
    hooks._global_forward_hooks.clear()
    hooks._global_forward_pre_hooks.clear()


class Training:
    """Two layers, whose weights are all powers of two: a flipped bit has a plain effect."""

    def __init__(self) -> None:
        self.last = torch.nn.Linear(FEATURES, 1)
        self.model = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), self.last)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.batch = torch.ones(2, FEATURES)

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = self.model(self.batch)
        return result

    def gradients(self) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        self.forward().sum().backward()  # type: ignore[no-untyped-call]
        return [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]


def inject(name: str, **options: object) -> None:
    numeric_faults.make(fault_request(name, **options))  # type: ignore[arg-type]


def values_that_differ(before: torch.Tensor, after: torch.Tensor) -> dict[int, float]:
    before, after = before.flatten(), after.flatten()
    return {int(at): float(after[at]) for at in (before != after).nonzero()}


def test_a_bit_of_a_parameter_is_flipped_once() -> None:
    training = Training()
    before = training.last.weight.detach().clone()
    inject("flip_parameter", target="1.weight:2")
    training.forward()
    training.forward()
    assert values_that_differ(before, training.last.weight.detach()) == {2: 1.0}
    assert not hooks._global_forward_hooks


def test_a_bit_of_a_parameter_that_is_stuck_is_so_after_each_update() -> None:
    training = Training()
    inject("flip_parameter", target="1.weight:2", amount=0, for_s=60)
    training.forward()
    with torch.no_grad():
        training.last.weight.fill_(3.0)
    training.forward()
    training.forward()
    assert training.last.weight.flatten().tolist() == [3, 3, -3, 3]


def test_a_bit_of_a_gradient_is_flipped_in_one_backward_pass() -> None:
    training = Training()
    healthy = training.gradients()
    inject("flip_gradient", target="1.bias")
    harmed = training.gradients()
    assert [values_that_differ(*pair) for pair in zip(healthy, harmed, strict=True)] == [
        {}, {}, {}, {0: 4.0},
    ]  # fmt: skip
    assert all(map(torch.equal, healthy, training.gradients()))


def test_hooks_of_the_script_see_the_harmed_gradient() -> None:
    training, seen = Training(), []
    training.last.bias.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: seen.append(gradient.item())
    )
    inject("flip_gradient", target="1.bias")
    training.gradients()
    assert seen == [4.0]


def test_a_bit_of_a_gradient_is_flipped_each_time_for_a_while() -> None:
    training = Training()
    healthy = training.gradients()
    inject("flip_gradient", target="1.bias", for_s=60)
    for _ in range(3):
        assert values_that_differ(healthy[3], training.gradients()[3]) == {0: 4.0}


def test_a_bit_of_a_reduced_gradient_is_flipped_as_the_optimizer_takes_it() -> None:
    training = Training()
    inject("flip_reduced_gradient", target="1.bias", amount=0)
    healthy = training.gradients()
    assert healthy[3].tolist() == [2.0]
    training.optimizer.step()
    assert training.last.bias.tolist() == [0.5 + 2.0]
    training.optimizer.step()
    assert training.last.bias.tolist() == [0.5 + 2.0 + 2.0], "once: the gradient stays harmed"


def test_a_bit_of_an_activation_is_flipped_and_the_gradient_uses_it() -> None:
    training = Training()
    healthy, gradients = training.forward(), training.gradients()
    inject("flip_activation", target="0:1", amount=0)
    with torch.no_grad():
        assert torch.equal(training.forward(), healthy), "an evaluation is left alone"
    harmed = training.forward()
    assert (harmed[1] == healthy[1]).all()
    assert (harmed[0] < healthy[0]).all()
    inject("flip_activation", target="0:1", amount=0)
    assert values_that_differ(gradients[2], training.gradients()[2]) == {1: 0.0}


def test_a_result_is_scaled() -> None:
    training = Training()
    healthy = training.forward()
    inject("scale_activation", for_s=60)
    for _ in range(2):
        assert torch.allclose(training.forward(), healthy * 1.001, rtol=1e-6)


def test_a_result_is_nan_once() -> None:
    training = Training()
    inject("nan_activation")
    assert training.forward().isnan().sum() == 1
    assert training.forward().isfinite().all()


def test_a_batch_is_poisoned_and_again_when_it_is_loaded_again() -> None:
    values, numbers = torch.arange(8.0).view(4, 2), torch.arange(4)
    loader = DataLoader(TensorDataset(values, numbers), batch_size=2)
    batches = iter(loader)
    next(batches)
    inject("poison_batch", amount=10)
    harmed, labels = next(batches)
    assert harmed.tolist() == [[40, 50], [60, 70]]
    assert labels.tolist() == [3, 3]
    again = [pair[0].tolist() for pair in loader]
    assert again == [[[0, 1], [2, 3]], [[40, 50], [60, 70]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_bit_counts_from_the_sign_in_each_type(dtype: torch.dtype) -> None:
    training = Training()
    training.model.to(dtype)
    inject("flip_parameter", target="1.bias", amount=63)
    training.model(training.batch.to(dtype))
    least = float(torch.finfo(dtype).eps) / 2
    assert training.last.bias.item() == 0.5 + least


def test_a_target_that_the_model_lacks_is_reported_with_those_it_has(
    capfd: pytest.CaptureFixture[str],
) -> None:
    training = Training()
    inject("flip_gradient", target="head.weight")
    training.gradients()
    assert "the model has no parameter 'head.weight', it has 0.weight, 0.bias" in (
        capfd.readouterr().err
    )


def test_a_wrapped_module_has_the_names_that_the_script_gave_it() -> None:
    training = Training()
    inject("flip_parameter", target="1.bias")

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = training.model

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.module(batch)  # type: ignore[no-any-return]

    Wrapper()(training.batch)
    assert training.last.bias.item() == 1.0
