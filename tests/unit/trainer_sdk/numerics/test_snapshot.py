"""A step is put back: random states, buffers and gradients."""

import random
from collections.abc import Callable

import numpy
import torch
from torch import nn

from trainer_sdk.numerics.snapshot import GROUPS_MOST, Snapshot, TrainingParts, random_states


def test_a_step_computes_the_same_again() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    parts = TrainingParts({"model": module, "optimizer": torch.optim.SGD(module.parameters())})
    parameters = list(parts.parameters())

    def step() -> list[object]:
        loss = module(torch.randn(6, 4)).sum() * random.random() * numpy.random.rand()
        loss.backward()
        buffers = [buffer.tolist() for buffer in module.buffers()]
        return [
            float(loss.detach()),
            buffers,
            [one.grad.tolist() for one in parameters if one.grad is not None],
        ]

    before = Snapshot(parts, parameters, again=True)
    first = step()
    before.put_back()
    assert all(parameter.grad is None for parameter in parameters)
    assert step() == first
    middle = Snapshot(parts, parameters)
    second = step()
    middle.put_back()
    assert step() == second


def test_generators_are_asked_only_when_they_have_moved() -> None:
    for draw in (random.random, random.gauss, numpy.random.rand, numpy.random.randn):
        random.seed(1)  # a normal number in store is not seen in the generator
        numpy.random.seed(1)
        first, same = random_states(), random_states()
        assert same is first
        for count in (1, 2, 3, 624):
            states = random_states()
            drawn = [draw() for _ in range(count)]
            states.put_back()
            assert [draw() for _ in range(count)] == drawn
    random.seed(4)
    seeded = random_states()
    assert seeded.python == random.getstate()
    random.seed(5)
    assert random_states().python == random.getstate() != seeded.python


def test_states_are_those_of_the_generators_whatever_is_drawn() -> None:
    """Also normal numbers in store, which come and go while the generator stays as it is."""
    dice, kept = random.Random(3), [random_states()]
    draws: list[Callable[[], object]] = [
        lambda: torch.randn(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.rand(700),
        lambda: random.gauss(0, 1),
        random.random,
        numpy.random.normal,
        lambda: numpy.random.rand(3),
        lambda: dice.choice(kept).put_back(),
    ]
    for _ in range(2000):
        dice.choice(draws)()
        states = random_states()
        kept = [*kept[-20:], states]
        assert torch.equal(states.torch, torch.get_rng_state())
        assert states.python == random.getstate()
        assert states.numpy is not None
        assert repr(states.numpy) == repr(numpy.random.get_state())


def test_gradients_stay_where_they_are() -> None:
    """They may be views of a bucket of DDP."""
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    parts = TrainingParts([module])
    snapshot = Snapshot(parts, list(parts.parameters()))
    gradient = module.weight.grad
    assert gradient is not None
    kept = gradient.clone()
    gradient.mul_(3)
    snapshot.put_back()
    assert module.weight.grad is gradient
    assert torch.equal(gradient, kept)


def test_a_large_buffer_is_copied_once_while_it_is_the_same() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(1 << 17))
    parts = TrainingParts({"model": module})
    copies = [parts.buffers(again=True)[0][3] for _ in range(2)]
    assert copies[0] is copies[1]
    module.get_buffer("table").add_(1)
    assert parts.buffers(again=True)[0][3] is not copies[0]


def test_a_large_buffer_that_changes_without_a_new_version_is_put_back() -> None:
    """As the codebook of a quantizer does, which is written by `data`."""
    module = nn.Module()
    module.register_buffer("table", torch.zeros(1 << 17))
    parts, table = TrainingParts({"model": module}), module.get_buffer("table")
    Snapshot(parts, [], again=True).put_back()
    table.data.add_(1)
    for number in (1, 2):
        before = Snapshot(parts, [], again=True)
        table.data.add_(1)
        after = Snapshot(parts, [])
        before.put_back()
        assert table[0] == number
        after.put_back()
        assert table[0] == number + 1


def test_a_buffer_that_was_replaced_is_put_back() -> None:
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(3))
    parts = TrainingParts({"model": module})
    former = module.get_buffer("seen")
    snapshot = Snapshot(parts, [], again=True)
    module.seen = torch.ones(3)
    snapshot.put_back()
    assert module.get_buffer("seen") is former
    module.seen = torch.ones(3)
    assert Snapshot(parts, [], again=True).buffers[0][3].tolist() == [1, 1, 1]


def test_parts_are_found_in_nested_states_once() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*module.parameters(), torch.zeros(1, requires_grad=True)])
    parts = TrainingParts(
        {"models": [module, {"b": other}], "again": module, "optimizer": optimizer}
    )
    assert parts.modules == [module, other]
    assert list(parts.named) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "optimizer.0.2",
    ]


def test_parameters_of_a_large_model_are_grouped_by_their_layers() -> None:
    layers = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(40)]
    parts = TrainingParts({"model": nn.Sequential(*layers)})
    assert parts.groups == [str(number) for number in range(40)]
    assert parts.groups[parts.group_of["7.1.bias"]] == "7"
    wide = TrainingParts({"model": nn.Sequential(*[nn.Linear(1, 1) for _ in range(100)])})
    assert len(wide.groups) <= GROUPS_MOST
    assert set(wide.group_of.values()) == set(range(len(wide.groups)))
