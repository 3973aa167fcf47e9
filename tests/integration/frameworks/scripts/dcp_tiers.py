"""Trains by torch's calls, with states in memory: `dcp_tiers.py FOLDER STEPS`.

With 0 steps, it loads from each tier in one process.

What is restored is written to `restored-ROUND-RANK`. KILL is a step after which rank 1 kills itself
in the first round; HOLD, after which all wait for their end there; LEAVE, after which all end
without a word. With DAMAGE, rank 1 damages all its images before it loads.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import trainer_sdk
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.manifest import IMAGE
from trainer_sdk.checkpoint.restore import stored_image
from trainer_sdk.integrations.dcp import DcpReader, DcpWriter, newest_verified

ROWS, EVERY = 12, 5
IS_LATER = bool(os.environ.get("EVERSTEP_TEST_LATER"))
FIRST = os.environ.get("EVERSTEP_ROUND", "1") == "1" and not IS_LATER


def join() -> None:
    store = os.environ.get("EVERSTEP_TEST_STORE")
    within = timedelta(seconds=200)
    if store is None:
        dist.init_process_group("gloo", timeout=within)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=within
    )


def state(step: int, dimension: int = 0, owner: int | None = None) -> dict[str, Any]:
    """The state at a step; by default, with the shards and keys that each rank saves."""
    owner = dist.get_rank() if owner is None else owner
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * 5, dtype=torch.float32).reshape(ROWS, 5) * step
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(dimension)]),
        "same": {f"w{one}": whole + one for one in range(3)},
        "odd": {"scalar": torch.tensor(step), "none": torch.empty(0), "half": whole[0].half()},
        "step": step,
        "own": {str(owner): torch.full((3,), float(step) + owner)},
    }


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        left, right = getattr(left, "_local_tensor", left), getattr(right, "_local_tensor", right)
        return torch.equal(left, right)
    return bool(left == right)


def damage(root: Path) -> None:
    images = Path(read_job_context(os.environ, "", str(root)).images)
    for image in [*images.glob(f"own/rank-1/*/{IMAGE}"), *images.glob(f"held/*/rank-1/*/{IMAGE}")]:
        with image.open("r+b") as file:
            file.seek(100)
            octet = file.read(1)[0]
            file.seek(100)
            file.write(bytes([octet ^ 1]))


def save(root: Path, step: int) -> None:
    writer = DcpWriter(keep_memory=True, to_root=step % EVERY == 0)
    save_state(state(step), checkpoint_id=f"{root}/step-{step}", storage_writer=writer)


def loaded(place: "Path | str", **layout: int) -> tuple[int, str | None]:
    """The step and tier of a state, which this rank loads into such a layout."""
    reader, live = DcpReader(place, keep_memory=True), state(0, **layout)
    load_state(live, storage_reader=reader)
    assert reader.step == live["step"]
    assert is_same(live, state(live["step"], **layout))
    return live["step"], reader.tier


def loaded_from(root: Path) -> tuple[int, str | None]:
    """The step and tier of the newest state, which this rank loads."""
    dist.barrier()
    step = newest_verified(root, keep_memory=True)
    found = loaded(root, dimension=1 if os.environ.get("OTHER_SHARDS") else 0)
    assert found[0] == step or os.environ.get("OTHER_SHARDS")
    return found


@contextmanager
def hashed_images() -> Iterator[list[int]]:
    """The sizes of the images that this rank verifies meanwhile."""
    sizes, hash_of_all = [], stored_image._hash

    def counted(octets: memoryview, *others: Any) -> str:
        sizes.append(len(octets))
        return hash_of_all(octets, *others)

    with patch.object(stored_image, "_hash", counted):
        yield sizes


def check_verified_once(root: Path) -> None:
    """The load after `newest_verified` does not verify an unchanged image again; others do."""
    with hashed_images() as sizes:
        assert loaded_from(root) == (7, "memory")
    assert len(sizes) == 1
    with hashed_images() as sizes:
        assert loaded(root) == (7, "memory")
    assert len(sizes) == 1


def check_other_layouts(root: Path) -> None:
    """A load with other shards, or with another rank's tensors, takes the global tier's step."""
    assert loaded(root, dimension=1) == (5, "global")
    assert loaded(root, owner=1 - dist.get_rank()) == (5, "global")
    assert loaded(f"{root}/step-5", dimension=1) == (5, "global")
    with pytest.raises(CheckpointException, match=r"step 7 cannot be restored.* in another way"):
        loaded(f"{root}/step-7", dimension=1)


def lose_images(root: Path) -> None:
    """Rank 1 has the copy of another node only, as after the loss of its own."""
    if dist.get_rank() == 1:
        images = Path(read_job_context(os.environ, "", str(root)).images)
        copies = images / "held" / "slot-1" / "rank-1"
        copies.parent.mkdir(parents=True)
        shutil.move(images / "own" / "rank-1", copies)


def check_refusals(root: Path) -> None:
    """Rank 1 alone neither saves nor loads, and waits for no other rank."""
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return
    alone: list[dict[str, Any]] = [{"no_dist": True}, {"process_group": group}]
    refused = pytest.raises(CheckpointException, match="1 of 2 ranks are here: .* without no_dist")
    for options in alone:
        with refused:
            load_state({}, storage_reader=DcpReader(root, keep_memory=True), **options)
        with refused:
            writer = DcpWriter(f"{root}/step-9", keep_memory=True)
            save_state({}, storage_writer=writer, **options)


def one_process(root: Path) -> None:
    """Each tier in turn: memory, another node's copy, and the global tier after damage."""
    rank = dist.get_rank()
    for step in range(1, 8):
        save(root, step)
    check_refusals(root)
    check_verified_once(root)
    check_other_layouts(root)
    lose_images(root)
    assert loaded_from(root) == (7, "peer" if rank == 1 else "memory")
    assert newest_verified(root, keep_memory=True) == 7
    if rank == 1:
        damage(root)  # what was verified is verified again
    dist.barrier()
    assert loaded(root) == (5, "global")
    assert loaded_from(root) == (5, "global")


def resumed(root: Path, folder: Path) -> int:
    """The step from which the training continues."""
    if os.environ.get("DAMAGE") and not FIRST and dist.get_rank() == 1:
        damage(root)
    dist.barrier()
    if newest_verified(root, keep_memory=True) is None:
        return 0
    step, tier = loaded_from(root)
    place = folder / f"restored-{os.environ.get('EVERSTEP_ROUND', '0')}-{dist.get_rank()}"
    place.with_suffix(".new").write_text(json.dumps([step, tier]))
    place.with_suffix(".new").rename(place)
    return step


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    join()
    root, run = folder / "checkpoints", trainer_sdk.session()
    if steps == 0:
        one_process(root)
    step = resumed(root, folder) if steps else 0
    while step < steps:
        step += 1
        save(root, step)
        run.step(step)
        if os.environ.get("LEAVE") == str(step):
            dist.barrier()  # the images of all ranks are complete
            os._exit(0)
        if FIRST and os.environ.get("KILL") == str(step) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if FIRST and os.environ.get("HOLD") == str(step):
            (folder / f"holds-{dist.get_rank()}").touch()
            while True:
                signal.pause()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
