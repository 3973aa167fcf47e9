"""Trains with an optimizer of its own, and says when torch's compiler was imported."""

import json
import sys
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"


class Descent(Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"])


def patched(self: Optimizer) -> dict[str, Any]:
    return {"of": type(self).__name__}


if __name__ == "__main__":
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    optimizer = Descent([weight], lr=0.25)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0})
    for _ in range(2):
        optimizer.zero_grad()
        (weight.square().sum() + 0 * optimizer.param_groups[1]["params"][0].sum()).backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    was_imported, kept = COMPILER in sys.modules, optimizer.zero_grad
    about, name = Optimizer.add_param_group.__doc__ or "", Optimizer.add_param_group.__qualname__
    Optimizer.state_dict = patched  # type: ignore[method-assign]

    compiled = torch.compile(lambda one: one + 1, backend="eager")
    found = compiled(weight).item()
    kept()
    files = {
        one: getattr(Optimizer, one).__code__.co_filename.rpartition("/")[2]
        for one in ("add_param_group", "zero_grad", "load_state_dict")
    }
    said = {
        "weight": weight.item(),
        "was_imported": was_imported,
        "is_imported": COMPILER in sys.modules,
        "compiled": found,
        "grad": weight.grad,
        "files": sorted(set(files.values())),
        "about": about.split(".")[0],
        "name": name,
        "patched": optimizer.state_dict(),
    }
    print(json.dumps(said))
