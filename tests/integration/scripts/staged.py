"""Stages of a pipeline, each sharded over its ranks: `FOLDER save|load`.

Four ranks save two stages with two shards each; two ranks load them, one stage each, and compare
with what torch's own loader gives them.
"""

import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer_sdk.checkpoint import Checkpointer

warnings.simplefilter("ignore")
STEP = 6


def stage(number: int, mesh: Any, value: float) -> dict[str, Any]:
    torch.manual_seed(number)
    layers: OrderedDict[str, torch.nn.Module] = OrderedDict(
        {f"stage{number}": torch.nn.Linear(5, 3 + number)}
    )
    model = torch.nn.Sequential(layers)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    return {f"model{number}": model, f"optimizer{number}": optimizer, "value": value}


def train(state: dict[str, Any], number: int) -> None:
    model = state[f"model{number}"]
    model(torch.ones(2, 5)).pow(2).sum().backward()
    state[f"optimizer{number}"].step()


def whole(found: Any) -> torch.Tensor:
    full: torch.Tensor = found.full_tensor() if isinstance(found, DTensor) else found
    return full


def tensors(state: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
    model, optimizer = state[f"model{number}"], state[f"optimizer{number}"]
    found = {key: whole(one) for key, one in model.state_dict().items()}
    for number_, values in optimizer.state_dict()["state"].items():
        found |= {f"{number_}.{key}": whole(one) for key, one in values.items()}
    return found


def main(folder: Path, action: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("stage", "shard"))
    number = rank // (size // 2)
    state = stage(number, mesh["shard"], 0.5 if action == "save" else 0.1)
    with Checkpointer(folder / "root", on_error="fatal") as saves:
        if action == "save":
            train(state, number)
            assert saves.save(STEP, state, wait=True).durable
            kept = tensors(state, number)
            if rank % 2 == 0:
                torch.save(kept, folder / f"stage{number}.pt")
        else:
            found = saves.restore(state)
            assert found is not None
            assert found.step == STEP
            saved = torch.load(folder / f"stage{number}.pt")
            own = tensors(state, number)
            assert own.keys() == saved.keys()
            assert all(torch.equal(own[key], saved[key]) for key in saved)
            assert state["value"] == 0.5
            model = stage(number, mesh["shard"], 0.1)[f"model{number}"]
            flat = {f"model{number}": model.state_dict()}
            load(flat, checkpoint_id=folder / "root" / f"step-{STEP:09d}")
            for key, one in flat[f"model{number}"].items():
                assert torch.equal(whole(one), own[key]), key
            print(f"stage {number} is whole", flush=True)
    dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2])
