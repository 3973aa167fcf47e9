"""Trains on DDP until the file `end` is there; a node computes NaN: `wrong_node.py FOLDER CHOICES`.

The ranks of the node `node`, or of all nodes, do so as long as the file `wrong` is there, and take
it away after the first time if `is_once`. With `is_alone` no other rank can compute a step. All
other choices are those of `run.numerics`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler, RngState

PACE_S = 0.02


class WrongNode:
    """The function of a step, on a device that may compute wrongly."""

    def __init__(self, model: nn.Module, folder: Path, node: str, *, is_once: bool) -> None:
        self._model = model
        self._file = folder / "wrong"
        self._is_here = node in ("", os.environ["EVERSTEP_NODE"])
        self._is_once = is_once

    def __call__(self, batch: list[Tensor]) -> Tensor:
        factor = 1.0
        if self._is_here and self._file.exists():
            factor = float("nan")
            if self._is_once:
                self._file.unlink()
        loss: Tensor = self._model(batch[0]).square().mean() * factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def main(folder: Path, node: str, *, is_once: bool, is_alone: bool, **choices: Any) -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = PositionedSampler(100_000, batch_size=4)
    loader = DataLoader(TensorDataset(torch.randn(100_000, 8)), batch_sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "random": RngState()}
    compute = WrongNode(model, folder, node, is_once=is_once)
    train(folder, state, loader, compute, is_alone=is_alone, **choices)
    dist.destroy_process_group()


def train(
    folder: Path,
    state: dict[str, Any],
    loader: Any,
    compute: Callable[[list[Tensor]], Tensor],
    *,
    is_alone: bool,
    **choices: Any,
) -> None:
    run, over = trainer_sdk.session(), torch.zeros(1)
    saves = Checkpointer(folder / "saved", every=10)
    choices |= {"mode": "validate_results", "checkpointer": saves}
    numerics = run.numerics(state, loader, **choices)
    saves.restore(state)
    for batch in numerics:
        state["optimizer"].zero_grad()
        of_batch = (lambda: compute(batch),) if is_alone else (compute, batch)  # noqa: B023
        if numerics.accepts(loss=numerics.compute(*of_batch)):
            state["optimizer"].step()
            saves.step(run.step(), state)
        time.sleep(PACE_S)
        over.fill_(float((folder / "end").exists()))
        dist.broadcast(over, 0)
        if over.item() or run.should_stop:
            break
    saves.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
