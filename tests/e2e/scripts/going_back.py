"""A training whose samples of step 8 are not numbers: it goes back, and on without them.

`in_place` goes back by its `Checkpointer`; with `restart` another round restores by itself.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler, RngState

LAST, BATCH, POISONED = 14, 4, range(56, 64)


def loader_of(sampler: PositionedSampler) -> Any:
    data: Any = [
        torch.tensor([float("nan") if number in POISONED else number / 1000])
        for number in range(1000)
    ]
    return DataLoader(data, batch_sampler=sampler)


def main(folder: Path, way: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = PositionedSampler(1000, batch_size=BATCH, shuffle=False)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "random": RngState()}
    is_in_place = way == "in_place"
    root = folder / "root"

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with (
        trainer_sdk.session() as run,
        Checkpointer(root, every=2, keep_memory=is_in_place) as saves,
    ):
        saves.restore(state)
        place: Any = {"checkpointer": saves} if is_in_place else {"root": str(root)}
        mode: Any = "validate_results"
        numerics = run.numerics(state, loader_of(sampler), mode=mode, unexpected="skip", **place)
        for batch in numerics:
            loss = numerics.compute(loss_of, batch)
            if numerics.accepts(loss=loss):
                optimizer.step()
                step = run.step()
                with (folder / f"steps-{dist.get_rank()}").open("a") as file:
                    file.write(f"{step} {sampler.consumed}\n")
                saves.step(step, state)
                saves.maybe_finalize(blocking=True)
            optimizer.zero_grad()
            if run.steps_made == LAST:
                break


main(Path(sys.argv[1]), sys.argv[2])
