"""A rank knows at each moment which step its state belongs to, and goes back to its boundary."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import nn

from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.survive.boundary import Boundary, RoundOver


class Training:
    def __init__(self) -> None:
        self.is_over = False
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = PositionedSampler(100, batch_size=5, place=(0, 1))
        self.state = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        self.boundary = Boundary(0, lambda: self.is_over)
        self.boundary.rank, self.boundary.round = 3, 2

    def forward(self) -> None:
        self.model(torch.randn(5, 2)).sum().backward()
        self.data.advance()


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    made.boundary.close()


def drawn() -> list[float]:
    return [random.random(), torch.rand(1).item(), float(numpy.random.rand())]


def test_a_state_is_torn_from_the_optimizer_to_the_end_of_the_step(training: Training) -> None:
    boundary = training.boundary
    boundary.begin(training.state, 7, made_in=1)
    training.forward()
    assert (boundary.step, boundary.is_torn, boundary.made_in) == (7, False, 1)
    training.optimizer.step()
    assert (boundary.step, boundary.is_torn) == (7, True)
    boundary.finished(8)
    assert (boundary.step, boundary.is_torn, boundary.made_in) == (8, False, 2)


def test_a_step_counts_though_the_round_is_over_before_it_ends(training: Training) -> None:
    boundary = training.boundary
    boundary.begin(training.state, 0, made_in=2)
    training.forward()
    kept = [buffer.clone() for buffer in training.model.buffers()]
    training.optimizer.step()
    training.is_over = True
    with pytest.raises(RoundOver):
        boundary.finished(1)
    boundary.put_back()
    assert (boundary.step, boundary.is_torn, training.data.consumed) == (1, False, 5)
    assert all(map(torch.equal, training.model.buffers(), kept))


def test_an_optimizer_does_not_tear_the_state_once_the_round_is_over(training: Training) -> None:
    boundary = training.boundary
    boundary.begin(training.state, 4, made_in=2)
    training.forward()
    before = [parameter.clone() for parameter in training.model.parameters()]
    training.is_over = True
    with pytest.raises(RoundOver):
        training.optimizer.step()
    assert (boundary.step, boundary.is_torn) == (4, False)
    assert all(map(torch.equal, training.model.parameters(), before))


def test_what_a_broken_step_has_changed_is_put_back(training: Training) -> None:
    boundary = training.boundary
    boundary.begin(training.state, 4, made_in=2)
    kept = [buffer.clone() for buffer in training.model.buffers()]
    training.forward()
    assert not all(map(torch.equal, training.model.buffers(), kept))
    boundary.put_back()
    assert all(map(torch.equal, training.model.buffers(), kept))
    assert training.data.consumed == 0
    boundary.begin(training.state, 4, made_in=2)
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_new_process_draws_the_numbers_of_the_lost_rank(training: Training) -> None:
    boundary = training.boundary
    boundary.begin(training.state, 4, made_in=2)
    boundary.finished(5)
    expected = drawn()
    boundary.finished(6)
    assert drawn() != expected
    boundary.begin(training.state, 5, made_in=2)
    assert drawn() == expected
    boundary.rank = 4
    boundary.begin(training.state, 5, made_in=2)
    assert drawn() != expected


def test_each_build_draws_the_same(training: Training) -> None:
    training.boundary.seed_build()
    expected = drawn()
    training.boundary.rank = 0
    training.boundary.seed_build()
    assert drawn() == expected
