"""Hashes of parameters on four real gloo ranks: `replicas.py FOLDER`.

Torch is imported once, and the ranks are forked. With each wrapper they train three steps, the last
one flips a bit of a parameter after the second, and all write what the comparisons say.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.numerics.replica_hash import ReplicaHash, local_part

WIDTH = 8


class Block(nn.Module):
    """Two layers and a norm, which tensor parallelism replicates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """The values, changed."""
        return values + self.down(torch.relu(self.up(self.norm(values))))  # type: ignore[no-any-return]


def whole() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block())


def replicated() -> nn.Module:
    return DistributedDataParallel(whole())


def staged() -> nn.Module:
    """Ranks 0 and 1 have the first block, 2 and 3 the second: each DDP of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    block = whole()[stage]
    return DistributedDataParallel(block, process_group=groups[stage])


def sharded(*shape: int) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    module = whole()
    fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return module


def tensor_parallel() -> nn.Module:
    """Only the norms are replicated, and those of different data ranks are not sharded alike."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = whole()
    for block in module:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        sides: Any = {
            "input_fn": lambda _, inputs, on: DTensor.from_local(inputs[0], on, [Replicate()]),
            "output_fn": lambda _, output, on: output.to_local(),
        }
        distribute_module(block.get_submodule("norm"), mesh["tensor"], **sides)
    fully_shard(module, mesh=mesh["data"])
    return module


def replicated_tensors() -> nn.Module:
    module = whole()
    replicate(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def unwrapped() -> nn.Module:
    return whole()


KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "ddp": replicated,
    "stages": staged,
    "fsdp": lambda: sharded(dist.get_world_size()),
    "hsdp": lambda: sharded(2, dist.get_world_size() // 2),
    "tp": tensor_parallel,
    "replicate": replicated_tensors,
    "none": unwrapped,
    "given": unwrapped,
}


def judged(kind: str) -> dict[str, Any]:
    """Whether there are replicas, and the judgement of each step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = KINDS[kind]()
    named = dict(module.named_parameters())
    groups = list(named)
    replicas = ReplicaHash(
        named,
        groups,
        {name: groups.index(name) for name in groups},
        [module],
        group_of_all(),
        dist.group.WORLD if kind == "given" else None,
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    judgements: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(world, 4, WIDTH)[rank if kind == "ddp" else 0]
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and rank == world - 1:
            flipped = "norm.weight" if kind == "tp" else "up.weight"
            flip(next(named[name] for name in named if name.endswith(flipped)))
        if replicas.has_replicas:
            replicas.start(step)
            while step == 2 and replicas.is_pending:  # ranks come to its end at different times
                replicas.go_on()
            judgement = replicas.taken()
            judgements.append(judgement and [judgement.kind, judgement.ranks, judgement.group])
    return {"has": replicas.has_replicas, "judged": judgements}


@torch.no_grad()
def flip(parameter: Tensor) -> None:
    """Flip the lowest bit of a single number."""
    bits = local_part(parameter).view(-1)[-1:].view(torch.int32)
    bits ^= 1


def run(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    results = {kind: judged(kind) for kind in KINDS}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


def main(folder: Path) -> int:
    """Fork the ranks, and wait for them."""
    torch.set_num_threads(1)
    pids = []
    for rank in range(4):
        pid = os.fork()
        if not pid:
            try:
                run(rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
