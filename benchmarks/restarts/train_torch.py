"""The same training with an optimizer of torch's, whose first one imports torch._dynamo."""

import sys

import torch

from benchmarks.restarts import steps

if __name__ == "__main__":
    steps.train(sys.argv[1:], lambda model: torch.optim.SGD(model.parameters()))
