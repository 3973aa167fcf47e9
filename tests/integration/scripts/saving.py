"""Run by a test: two ranks save what FSDP2 and DTensor make, and load it by torch alone."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_sdk.checkpoint import Checkpointer


def main() -> None:
    root = sys.argv[1]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}.meeting",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sharded": distribute_tensor(torch.arange(63.0).view(9, 7), mesh, [Shard(0)]),
            "replicated": torch.arange(50.0),
            "value": {"lr": 0.1},
            f"rank{rank}": {"seed": rank},
        }

    step()
    with Checkpointer(root, job="fsdp", optimizers=(optimizer,)) as saves:
        expected = {key: whole(one) for key, one in model.state_dict().items()}
        moments = whole(optimizer.state_dict()["state"][0]["exp_avg"])
        saves.save(1, state())
        step()  # at once: this changes the part that would be copied later
        assert saves.maybe_finalize(blocking=True, within_s=40) == [1]
    found = state()
    found |= {"replicated": torch.zeros(50), "value": {"lr": None}, f"rank{rank}": {"seed": None}}
    load(found, checkpoint_id=f"{root}/step-000000001")
    assert all(torch.equal(whole(one), expected[key]) for key, one in found["model"].items())
    assert torch.equal(whole(found["optimizer"]["state"][0]["exp_avg"]), moments)
    assert torch.equal(found["replicated"], torch.arange(50.0))
    assert found["value"] == {"lr": 0.1}
    assert found[f"rank{rank}"] == {"seed": rank}
    torch.save(expected, f"{root}/expected-{rank}.pt")
    dist.destroy_process_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


if __name__ == "__main__":
    main()
