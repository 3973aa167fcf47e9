"""DDP with the same batches on two and three ranks: `shared.py FOLDER`.

Torch is imported once, and the ranks of each launch are forked; they write losses and parameters.
"""

import contextlib
import json
import os
import sys
import traceback
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each training would import it with its first optimizer
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.rank_session import session

GLOBAL_BATCH, AT_MOST, SIZE = 13, 3, 50
LAUNCHES = {"changing": (2, 3, 2), "two": (2, 2, 2), "two again": (2, 2, 2), "alone": (1, 1, 1)}
"""The number of ranks in each of three rounds."""
STEPS = 4

State = dict[str, Any]


def build() -> State:
    """A training of which each rank has all."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sampler = PositionedSampler(SIZE, batch_size=1, seed=5, place=(0, 1))
    return {"model": model, "optimizer": optimizer, "data": sampler}


DATA = TensorDataset(
    torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(SIZE)
)


def train(state: State) -> tuple[list[float], list[int]]:
    """The losses of all ranks' samples, and this rank's samples, of some steps."""
    share = session().share(GLOBAL_BATCH, at_most=AT_MOST)
    state["data"].divide(share)
    ddp = DistributedDataParallel(state["model"])
    batches = state["data"].counted(DataLoader(DATA, batch_sampler=state["data"]))
    losses: list[float] = []
    samples: list[int] = []
    for _ in range(STEPS):
        whole = torch.zeros(1, dtype=torch.float64)
        for micro, (inputs, numbers) in zip(share, batches, strict=False):
            with contextlib.nullcontext() if micro.is_last else ddp.no_sync():
                loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean() * micro.weight
                loss.backward()
            whole += loss.detach()
            samples += numbers.tolist() if micro.weight else []
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        dist.all_reduce(whole)
        losses.append(whole.item() / dist.get_world_size())
    return losses, samples


def _be_rank(rank: int, world_size: int, before: Path, after: Path) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{after}-store", rank=rank, world_size=world_size
        )
        state = build()
        if before.exists():
            for name, part in torch.load(before, weights_only=True).items():
                state[name].load_state_dict(part)
        losses, samples = train(state)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, samples)
        if rank == 0:
            torch.save({name: part.state_dict() for name, part in state.items()}, after)
            weights = [each.flatten().tolist() for each in state["model"].parameters()]
            told = {"losses": losses, "samples": gathered, "weights": [*chain(*weights)]}
            Path(f"{after}.json").write_text(json.dumps(told))
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def main(folder: Path) -> None:
    """Run all launches."""
    for name, worlds in LAUNCHES.items():
        for number, world_size in enumerate(worlds):
            before, after = (folder / f"{name}-{each}" for each in (number - 1, number))
            ranks = []
            for rank in range(world_size):
                child = os.fork()
                if not child:
                    _be_rank(rank, world_size, before, after)
                ranks.append(child)
            for child in ranks:
                os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
