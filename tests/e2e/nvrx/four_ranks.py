"""Run by a test: four ranks on two nodes save as with NVRx, and lose a node and a bit.

`four_ranks.py FOLDER`; the folder of a node is FOLDER/node-N.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    LazyCliqueReplicationStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException


def state(rank: int, iteration: int) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict(
        {
            "w": torch.full((1000,), rank + iteration / 8),
            "h": [torch.ones(3).half()],
            "n": iteration,
        }
    )


def manager(folder: Path, rank: int, swapped: int = 0) -> LocalCheckpointManager:
    """Two ranks a node, and the copy of each on the other node."""
    return LocalCheckpointManager(
        folder / f"node-{rank // 2 ^ swapped}", repl_strategy=LazyCliqueReplicationStrategy(2, 2)
    )


def restored(folder: Path, rank: int, iteration: int, swapped: int = 0) -> None:
    """A manager of a new process finds this iteration, and every value of it."""
    again = manager(folder, rank, swapped)
    assert again.find_latest() == iteration
    found, id_ = again.load()
    assert id_ == (iteration, rank, "")
    assert (
        found.to_state_dict()["w"].tolist() == state(rank, iteration).to_state_dict()["w"].tolist()
    )
    assert found.to_state_dict()["h"][0].dtype == torch.float16
    assert found.to_state_dict()["n"] == iteration
    dist.barrier()


def on_first(rank: int, act: object) -> None:
    dist.barrier()
    if rank == 0:
        act()  # type: ignore[operator]
    dist.barrier()


def flip(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[len(octets) // 2] ^= 1
    path.write_bytes(octets)


def a_rank_fails(folder: Path, rank: int, queue: AsyncCallsQueue) -> None:
    """The save of one rank fails: all ranks raise, and none has a checkpoint."""
    writer = FileSystemWriterAsync(folder / "global")
    planned = save_state_dict_async_plan({f"r{rank}": torch.ones(3)}, writer)
    on_first(rank, (folder / "global" / "__1_0.distcp").mkdir)
    function, preload, arguments = writer.get_save_function_and_args()
    queue.schedule_async_request(
        AsyncRequest(
            function,
            arguments,
            [lambda: save_state_dict_async_finalize(*planned)],
            preload_fn=preload,
        )
    )
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointException as error:
        assert set(error.failures) == {1}, error.failures
    else:
        raise AssertionError("nothing was raised")
    assert not (folder / "global" / ".metadata").exists()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, queue = dist.get_rank(), AsyncCallsQueue()
    saves = manager(folder, rank)
    assert saves.find_latest() == -1
    saves.save(state(rank, 1), 1)
    request = saves.save(state(rank, 2), 2, is_async=True)
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    restored(folder, rank, 2)

    on_first(rank, lambda: shutil.rmtree(folder / "node-1"))
    restored(folder, rank, 2)

    saves.save(state(rank, 3), 3)  # the new node has copies again
    on_first(rank, lambda: flip(folder / "node-1" / "3" / "iter_0000003_3_local.pt"))
    restored(folder, rank, 3)  # from the copy of rank 1

    restored(folder, rank, 3, swapped=1)  # the nodes have other ranks now

    a_rank_fails(folder, rank, queue)
    queue.close()
    (folder / f"done-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
