"""The training that every launcher restarts: torch is its only heavy import.

torchrun --nproc-per-node 2 train.py FOLDER [rest]
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.restarts import steps


class Descent(torch.optim.Optimizer):
    """Plain gradient descent. torch's own optimizers import torch._dynamo, as much as torch."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({"params": list(param_group["params"])})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


def main(arguments: list[str]) -> None:
    steps.train(arguments, lambda model: Descent(model.parameters()))


if __name__ == "__main__":
    main(sys.argv[1:])
