"""A small real training: two layers learn a function, on as many ranks as there are.

It knows nothing of Everstep: `torchrun train.py FOLDER STEPS` runs it as well. With a third
argument it rests for that number of seconds after each step. It ends early, after a save, once the
folder has a file `enough`.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_SAVE_EVERY = 20


def main(folder: Path, steps: int, rest_s: float = 0.0) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # In a function of its own: what still refers to the process group when that is destroyed can
    # keep torch from ending.
    _train(folder / "latest.pt", steps, rest_s)
    dist.destroy_process_group()


def _train(latest: Path, steps: int, rest_s: float) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, first = dist.get_rank(), _restore(latest, model, optimizer)
    if rank == 0:
        print(f"going on from step {first}")
    batches = torch.Generator().manual_seed(rank)
    for step in range(first + 1, steps + 1):
        inputs = torch.randn(4096, 8, generator=batches)
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % _SAVE_EVERY == 0:
            if rank == 0:
                _save(latest, model, optimizer, step)
                print(f"step {step}  loss {loss.item():.4f}")
            if _is_enough(latest.parent):
                return
        time.sleep(rest_s)


def _is_enough(folder: Path) -> bool:
    """What rank 0 sees counts for all."""
    is_enough = torch.tensor(float((folder / "enough").exists()))
    dist.broadcast(is_enough, src=0)
    return bool(is_enough)


def _restore(latest: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not latest.exists():
        return 0
    saved = torch.load(latest, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(latest: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    fresh = latest.with_suffix(".new")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, fresh)
    fresh.replace(latest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
