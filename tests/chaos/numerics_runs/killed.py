"""A training under `everstep run` that is killed while it judges a step: `killed.py FOLDER POINT`.

In step 54 rank 1 computes NaN once, and the data of step 58 is bad. Each rank appends to
`told-RANK` the steps that count, with their losses. With the point `never` it trains on the same
data without the bad part, and nothing looks at it.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler, RngState
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.skips import Skips

STEPS, WRONG_AT, BAD_AT, BATCH, WIDTH = 64, 54, 58, 4, 8
POINTS = ("again", "agreement", "decided", "recorded", "back")
_SAVES_EVERY = 4


class Script:
    """One rank."""

    def __init__(self, folder: Path, point: str) -> None:
        self.folder, self.point = folder, point
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.calls: dict[int, int] = {}
        self.is_judging = False
        torch.manual_seed(1)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        torch.manual_seed(10 + self.rank)
        unit = BATCH * self.world
        self.bad = ((BAD_AT - 1) * unit, BAD_AT * unit)
        inputs = torch.randn((STEPS + 2) * unit, WIDTH)
        labels = inputs.mean(dim=1, keepdim=True)
        labels[slice(*self.bad)] *= 1000
        self.sampler = PositionedSampler(len(inputs), batch_size=BATCH, shuffle=False)
        self.loader = DataLoader(TensorDataset(inputs, labels), batch_sampler=self.sampler)

    def compute(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        self.calls[self.step] = self.calls.get(self.step, 0) + 1
        if self.calls[self.step] == 3 and self.step in (WRONG_AT, BAD_AT):
            self.kill("again")
        output = self.model(inputs)
        is_wrong = self.point != "never" and self.step == WRONG_AT and self.rank == 1
        if is_wrong and self.is_first("wrong"):
            output = output * float("nan")
        loss: Tensor = nn.functional.mse_loss(output, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def is_first(self, name: str) -> bool:
        """Whether nobody has asked before; a rank of a later round asks, too."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def kill(self, point: str) -> None:
        """Kill this rank, if it is the one, and this is the point; once in a job."""
        if point == self.point and self.rank == 0 and self.is_first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        run = trainer_sdk.session()
        state: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer,
            "sampler": self.sampler, "rng": RngState(),
        }  # fmt: skip
        saves = Checkpointer(self.folder / "states")
        choices: dict[str, Any] = {"mode": "disabled"}
        if self.point != "never":
            choices = {"mode": "validate_results", "unexpected": "skip"}
        numerics = run.numerics(state, self.loader, checkpointer=saves, **choices)
        state["numerics"] = numerics
        saves.restore(state)
        if self.point == "never":
            self.sampler.skip([self.bad])
        self.train(run, numerics, saves, state)
        saves.close()

    def train(self, run: Any, numerics: Numerics, saves: Checkpointer, state: Any) -> None:
        with (self.folder / f"told-{self.rank}").open("a", buffering=1) as told:
            for batch in numerics:
                self.step = run.steps_made + 1
                loss = numerics.compute(self.compute, batch)
                if numerics.accepts(loss=loss):
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    told.write(f"{self.step} {float(loss).hex()}\n")
                    if self.step % _SAVES_EVERY == 0:
                        saves.save(self.step, state, wait=True)
                self.optimizer.zero_grad()
                run.step()
                if run.steps_made == STEPS:
                    return


def kill_within(script: Script) -> None:
    """Kill at the begin or the end of functions that judge and act."""

    def wrap(owner: type, name: str, before: str = "", after: str = "") -> None:
        whole: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            script.kill(before)
            result = whole(*args, **kwargs)
            script.kill(after)
            return result

        setattr(owner, name, wrapped)

    gather = RankGroup.gather

    def gathered(group: RankGroup, *args: Any) -> Any:
        if script.step in (WRONG_AT, BAD_AT):
            script.kill("agreement")
        return gather(group, *args)

    RankGroup.gather = gathered  # type: ignore[assignment,method-assign]
    wrap(Skips, "add", before="decided", after="recorded")
    wrap(Checkpointer, "roll_back", after="back")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    script = Script(Path(sys.argv[1]), sys.argv[2])
    kill_within(script)
    script.run()
    dist.destroy_process_group()
