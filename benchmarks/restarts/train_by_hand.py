"""The same training without an optimizer: nothing counts its steps, none needs torch.optim."""

import sys

import torch
from torch import nn

from benchmarks.restarts import steps


class Descent:
    """Plain gradient descent, by hand."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


if __name__ == "__main__":
    steps.train(sys.argv[1:], Descent)
