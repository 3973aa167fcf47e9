"""Trains with a poisoned batch and passes over it: `poisoned.py FOLDER`; prints what came out.

Two ranks with DDP each train twice: with the poisoned samples, and without them from the start.
"""

import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler, RngState
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.rank_session import session
from trainer_sdk.testing import watched
from trainer_sdk.wire import NumericsReported

WORLD, STEPS, BATCH, WIDTH = 2, 12, 4, 8
POISONED_STEP = 7
EACH = WORLD * BATCH
SPAN = ((POISONED_STEP - 1) * EACH, POISONED_STEP * EACH)


class Samples(Dataset[Tensor]):
    """Random samples; some of them are not numbers."""

    def __init__(self, poisoned: range) -> None:
        self._poisoned = poisoned

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        sample = torch.randn(WIDTH, generator=generator)
        return sample * float("nan") if index in self._poisoned else sample


def trained(folder: Path, *, is_poisoned: bool) -> dict[str, Any]:
    """Train, and return losses, samples and events."""
    torch.manual_seed(3)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    sampler = PositionedSampler(4096, batch_size=BATCH, shuffle=False)
    loader = DataLoader(Samples(range(*SPAN) if is_poisoned else range(0)), batch_sampler=sampler)
    state: dict[str, Any] = {
        "model": module,
        "optimizer": optimizer,
        "random": RngState(),
        "data": sampler,
    }
    torch.manual_seed(5)
    losses: list[float] = []
    with watched(dist.get_rank()) as watch:
        run = session()
        checkpointer = Checkpointer(folder, every=2)
        numerics = Numerics(
            run,
            state,
            loader,
            mode="validate_results",
            unexpected="skip",
            checkpointer=checkpointer,
        )
        if not is_poisoned:
            sampler.skip([SPAN])

        checkpointer.restore(state)
        for batch in numerics:
            loss = numerics.compute(partial(_computed, module), batch)
            if numerics.accepts(loss=loss):
                optimizer.step()
                run.step()
                del losses[run.steps_made - 1 :]
                losses.append(float(loss.detach()))
                checkpointer.step(run.steps_made, state)
            optimizer.zero_grad()
            if run.steps_made == STEPS:
                break
        checkpointer.close()
        events = [
            {"event": message.event, **message.body}
            for message in watch.messages
            if isinstance(message, NumericsReported)
        ]
        return {"losses": losses, "consumed": sampler.consumed, "events": events}


def _computed(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def main(folder: Path) -> int:
    """Fork the ranks, and wait for them."""
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            try:
                _rank(rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def _rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    place = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=WORLD)
    results = {
        "poisoned": trained(folder / "poisoned", is_poisoned=True),
        "clean": trained(folder / "clean", is_poisoned=False),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
