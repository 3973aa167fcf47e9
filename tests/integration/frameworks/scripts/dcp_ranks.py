"""A rank that saves a sharded state by torch's calls, and loads it: `dcp_ranks.py FOLDER`."""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_sdk.integrations.dcp import DcpReader, DcpWriter, newest_verified

ROWS = 12


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 5, dtype=torch.float32).reshape(ROWS, 5) * step
    return {
        "model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "same": whole.clone()},
        "step": step,
        "own": {str(dist.get_rank()): torch.full((3,), float(step))},
    }


def save(root: str) -> None:
    writer = DcpWriter()
    for step in (1, 2, 3):
        save_state(state(step), checkpoint_id=f"{root}/step-{step}", storage_writer=writer)


def cached(root: str) -> None:
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save_state(
            state(step),
            checkpoint_id=f"{root}/step-{step}",
            storage_writer=DcpWriter(),
            planner=planner,
        )


def failing(root: str) -> None:
    """The copy of rank 1 fails once: no rank has saved that step, and the next step is saved."""
    bad = state(1)
    if dist.get_rank() == 1:
        bad["own"]["1"] = Exception("no data")
    try:
        save_state(bad, checkpoint_id=f"{root}/step-1", storage_writer=DcpWriter())
    except CheckpointException as error:
        assert "own.1" in str(error), error
    else:
        raise AssertionError("the save has not failed")
    save_state(state(2), checkpoint_id=f"{root}/step-2", storage_writer=DcpWriter())


def load(root: str) -> None:
    """Each rank loads its shard of the newest checkpoint."""
    step = newest_verified(root)
    assert step == 3
    loaded, wanted = state(0), state(step)
    load_state(loaded, checkpoint_id=f"{root}/step-{step}", storage_reader=DcpReader())
    assert loaded["step"] == step
    here, there = loaded["model"]["sharded"], wanted["model"]["sharded"]
    assert isinstance(here, DTensor)
    assert torch.equal(here.to_local(), there.to_local())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['EVERSTEP_TEST_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    for do in (save, cached, failing):
        do(f"{sys.argv[1]}/{do.__name__}")
    load(f"{sys.argv[1]}/save")
    dist.barrier()
    dist.destroy_process_group()
