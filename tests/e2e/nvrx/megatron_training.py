"""A training with Megatron-Core's own checkpoints, on the CPU: what it asks of CUDA is stubbed.

`megatron_training.py FOLDER`: rank 1 dies in the first round after step 4. Megatron-Core saves by
NVRx's strategy to a shared folder, and local checkpoints on each node.
"""

import json
import os
import signal
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

STEPS, FAULT_AFTER = 6, 4


class Nothing(ModuleType):
    """A module in which everything is a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return unchanged


def unchanged(*arguments: Any, **_: Any) -> Any:
    return arguments[0] if arguments and callable(arguments[0]) else unchanged


class NoTriton(MetaPathFinder, Loader):
    """Triton's kernels are for GPUs: none of them is called here."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        module.__dict__["__version__"] = "3.4.0"


def stub_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    sys.meta_path.insert(0, NoTriton())
    torch.compile = unchanged  # its compiler would look into the module triton


def main(folder: Path) -> None:  # noqa: PLR0915 - to be read from top to bottom
    stub_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.nvrx import is_nvrx_min_version
    from megatron.core.dist_checkpointing.strategies.torch import (
        HAVE_NVRX,
        TorchDistSaveShardedStrategy,
        get_async_strategy,
    )
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
        LocalCheckpointManager,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    assert HAVE_NVRX
    assert is_nvrx_min_version("0.6.0")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first_round = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def state(step: int) -> dict[str, Any]:
        own, shared = torch.full((4, 3), 10.0 * step + rank), torch.full((5,), float(step))
        return {
            "own": ShardedTensor.from_rank_offsets("own", own, (0, rank, size)),
            "shared": ShardedTensor.from_rank_offsets("shared", shared, replica_id=rank),
            "step": step,
        }

    def check(loaded: dict[str, Any], step: int) -> None:
        assert loaded["step"] == step
        assert loaded["own"].tolist() == [[10.0 * step + rank] * 3] * 4
        assert loaded["shared"].tolist() == [float(step)] * 5

    _, modules = get_async_strategy("nvrx")
    queue = modules["AsyncCallsQueue"](persistent=True)
    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    manager = LocalCheckpointManager(
        folder / f"disk-{rank}",
        repl_strategy=CliqueReplicationStrategy.from_replication_params(1, 2),
    )
    first = max(manager.find_latest(), 0)
    assert first == (0 if is_first_round else FAULT_AFTER)
    if first:
        found, _ = manager.load()
        check(found.to_state_dict(state(0), parallelization_group=dist.group.WORLD), first)
        check(dist_checkpointing.load(state(0), str(folder / f"iter_{first:07d}")), first)
    for step in range(first + 1, STEPS + 1):
        place = folder / f"iter_{step:07d}"
        if rank == 0:
            place.mkdir(exist_ok=True)
        dist.barrier()
        request = dist_checkpointing.save(
            state(step), str(place), sharded_strategy=strategy, async_sharded_save=True,
            async_strategy="nvrx",
        )  # fmt: skip
        queue.schedule_async_request(request)
        local, _ = MCoreTensorAwareStateDict.from_state_dict(
            state(step), algo="atomic", parallelization_group=dist.group.WORLD
        )
        queue.schedule_async_request(manager.save(local, step, is_async=True))
        assert len(queue.maybe_finalize_async_calls(blocking=True)) == 2
        if is_first_round and (rank, step) == (1, FAULT_AFTER):
            os.kill(os.getpid(), signal.SIGKILL)
    queue.close()
    reuses = strategy._metadata_cache.validated_cache_reuse
    (folder / f"end-{rank}").write_text(json.dumps([first, manager.find_latest(), reuses]))
    dist.destroy_process_group()


if __name__ == "__main__":  # Megatron-Core may spawn processes that import this file
    main(Path(sys.argv[1]))
