"""A training whose batches of steps 8 to 10 are bad: seen at step 10, it goes back without them.

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
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.rollback import Rollback

MOVED_AT, SEEN_AT, LAST, BATCH = 8, 10, 16, 4


def tell(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def loader_of(sampler: PositionedSampler) -> Any:
    data: Any = [torch.tensor([number / 1000]) for number in range(1000)]
    return DataLoader(data, batch_sampler=sampler)


def main(folder: Path, way: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = PositionedSampler(1000, batch_size=BATCH, seed=1)
    state = {"model": model, "optimizer": optimizer, "data": sampler, "random": RngState()}
    is_in_place = way == "in_place"
    with (
        trainer_sdk.session() as run,
        Checkpointer(folder / "root", every=2, keep_memory=is_in_place) as saves,
    ):
        saves.restore(state)
        rollback = Rollback(
            state,
            run,
            checkpointer=saves if is_in_place else None,
            root="" if is_in_place else str(folder / "root"),
        )
        batches = Batches(loader_of(sampler), state, rollback.skips.spans)
        bad_end = SEEN_AT * BATCH * dist.get_world_size()
        for batch in batches:
            step = run.steps_made + 1
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if (batches.position or (0, 0))[1] == bad_end:
                samples = batches.span(MOVED_AT, step)
                rollback.back_to(
                    MOVED_AT, batches, case="c1", step=step, reason="a spike", samples=samples
                )
                continue
            optimizer.step()
            tell(folder / f"steps-{rank}", f"{step} {batches.position}\n")
            batches.taken(step)
            run.step(step)
            saves.step(step, state)
            saves.maybe_finalize(blocking=True)
            if step == LAST:
                break


main(Path(sys.argv[1]), sys.argv[2])
