"""A training that runs each step again, and in which rank 1 is killed in the middle of that.

In round 1 it is killed while a step is run again, in round 2 while it computes the step of another
rank, in round 3 while the ranks agree. Each loss is appended to `losses-RANK`, with its step.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler, RngState

STEPS, AFTER = 24, 5
"""The last step, and the steps that a round makes before the kill."""
RUNS_OF_A_STEP = 4
"""The first one, twice again, and that of another rank."""
KILLED_IN = {1: "again", 2: "elsewhere", 3: "agreement"}


class Kill:
    """Kills rank 1 once it has made some steps in this round."""

    def __init__(self) -> None:
        self._place = KILLED_IN.get(int(os.environ["EVERSTEP_ROUND"]), "")
        self._runs = self._agreements = 0

    def computing(self) -> None:
        """The training computes a step, for the first time or again."""
        self._runs += 1
        step, run = divmod(self._runs - 1, RUNS_OF_A_STEP)
        if step == AFTER and run == {"again": 1, "elsewhere": 3}.get(self._place):
            self._now()

    def agreeing(self) -> None:
        """The training has computed a step, and agrees about it with the other ranks."""
        self._agreements += 1
        if self._place == "agreement" and self._agreements > AFTER:
            self._now()

    def _now(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(mode=True)
    train(folder)
    dist.destroy_process_group()


def train(folder: Path) -> None:
    rank, run, kill = dist.get_rank(), trainer_sdk.session(), Kill()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    sampler = PositionedSampler(1000, batch_size=4)
    samples = TensorDataset(torch.randn(1000, 8))
    state = {"model": model, "optimizer": optimizer, "random": RngState(), "data": sampler}
    saves = Checkpointer(folder / "saved", every=2)
    numerics = run.numerics(
        state,
        DataLoader(samples, batch_sampler=sampler),
        mode="validate_results",
        validate_every=1,
        checkpointer=saves,
    )
    agree = numerics._agreement.joined

    def agreed(own: int) -> int:
        kill.agreeing()
        return agree(own)

    numerics._agreement.joined = agreed  # type: ignore[method-assign]
    torch.manual_seed(2 + rank)
    saves.restore(state)

    def compute(batch: list[Tensor]) -> Tensor:
        kill.computing()
        loss: Tensor = model(batch[0]).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for batch in numerics:
        optimizer.zero_grad()
        loss = numerics.compute(compute, batch)
        if numerics.accepts(loss=loss):
            optimizer.step()
            run.step()
            with (folder / f"losses-{rank}").open("a") as file:
                file.write(f"{run.steps_made} {loss.item()!r}\n")
            saves.step(run.steps_made, state)
        if run.steps_made >= STEPS:
            break
    saves.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
