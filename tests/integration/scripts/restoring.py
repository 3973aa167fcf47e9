"""Trains a sharded model on real ranks, kills them, and has others go on; writes what they saw.

Torch is imported once; the ranks of each round are forked from here.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each rank would import it with its first optimizer
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler, RngState
from trainer_sdk.checkpoint.manifest import ImageIndex, decode

DATA = torch.arange(64 * 16).view(64, 16).sin()
LAST = 9


class Training:
    """One rank's."""

    def __init__(self, folder: Path, **how: Any) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3)
        )
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = PositionedSampler(len(DATA), batch_size=4 // dist.get_world_size(), seed=2)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.data,
            "random": RngState(),
        }
        self.saves = Checkpointer(folder / "root", job="restoring", keep_memory=True, **how)

    def go_on(self, step: int) -> list[float]:
        """The losses of all steps that follow."""
        losses = []
        for batch in self.data.counted(self.data):
            step += 1
            loss = self.model(DATA[batch]).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.saves.check_loss(losses[-1])
            self.saves.step(step, self.state)
            self.saves.maybe_finalize(blocking=True)
            if step == LAST:
                return losses
        raise AssertionError("the data has no end")

    def weights(self) -> list[float]:
        """The sums of all parameters, whole."""
        found = []
        for one in self.model.parameters():
            assert isinstance(one, DTensor)
            found.append(one.full_tensor().double().sum().item())
        return found


def first(folder: Path) -> dict[str, Any]:
    """From scratch to the end; all that has been saved by then stays."""
    training = Training(folder, every=4, memory_every=2)
    assert training.saves.restore(training.state) is None
    return {"losses": training.go_on(0)}


def again(folder: Path) -> dict[str, Any]:
    """From what there is to the end; nothing is saved."""
    training = Training(folder, every=1000)
    found = training.saves.restore(training.state)
    assert found is not None
    return {
        "step": found.step,
        "tier": found.tier,
        "passed": [one.reason for one in found.passed],
        "weights": training.weights(),
        "losses": training.go_on(found.step),
    }


def in_round(
    folder: Path, number: int, world_size: int, work: Callable[[Path], dict[str, Any]]
) -> None:
    """Fork the ranks of a round, and wait until all of them have been killed."""
    images = folder / "images"
    images.mkdir(mode=0o700, exist_ok=True)
    (images / "offer.json").write_text(json.dumps({"round": number, "complete": True}))
    ranks = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(world_size),
                EVERSTEP_ROUND=str(number),
                EVERSTEP_IMAGES=str(images),
            )
            _be_rank(folder, f"round-{number}-rank-{rank}.json", work)
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)


def _be_rank(folder: Path, name: str, work: Callable[[Path], dict[str, Any]]) -> None:
    store = f"file://{folder}/store-{os.environ['EVERSTEP_ROUND']}"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        said = work(folder)
        dist.barrier()
    except BaseException as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    (folder / name).write_text(json.dumps(said))
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    own = folder / "images/own"
    in_round(folder, 1, 2, first)
    in_round(folder, 2, 2, again)
    [newest] = [
        one.parent
        for one in (own / "rank-1").glob("*/index.json")
        if decode(one.read_bytes(), ImageIndex, str(one)).identity.step == 8
    ]
    octets = bytearray((newest / "image").read_bytes())
    octets[len(octets) // 3] ^= 4
    (newest / "image").write_bytes(octets)
    in_round(folder, 3, 2, again)
    shutil.rmtree(own / "rank-1")
    in_round(folder, 4, 2, again)
    in_round(folder, 5, 1, again)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
