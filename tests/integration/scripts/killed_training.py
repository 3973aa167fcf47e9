"""A training that is killed with its writer again and again, and goes on from what there is.

`killed_training.py FOLDER N SEED MOST` kills it N times: at a random count, of MOST at most, of its
steps and of the lines that its writer says. Torch is imported once; each training is forked from
here.
"""

import json
import os
import random
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # each training would import it with its first optimizer

from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler, Randomness
from trainer_sdk.checkpoint.delivery import Delivery
from trainer_sdk.checkpoint.writer.orders import Done, Kept

DATA = torch.arange(64 * 16).view(64, 16).sin()
STEPS = 12
"""What each of them makes, unless it is killed."""


class Training:
    def __init__(self, folder: Path) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.data = PositionedSampler(len(DATA), batch_size=4, seed=2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.data,
            "random": Randomness(),
        }
        self.saves = Checkpointer(
            folder / "root",
            job="killed",
            every=3,
            memory_every=1,
            keep_memory=True,
            on_error="fatal",
        )

    def step(self, batch: list[int]) -> float:
        loss = self.model(DATA[batch]).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Telling:
    """Tells each step, and what lasts of it; kills itself at the `last`-th time."""

    def __init__(self, path: Path, last: int) -> None:
        self._told = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._counter = count(1)
        self._last = last
        hear = Delivery._hear

        def hear_and_count(delivery: Delivery, line: Any) -> None:
            save = delivery.saves.get(line.save)
            if save is not None and save.step is not None and isinstance(line, (Done, Kept)):
                self.tell("lasts", save.step)
            hear(delivery, line)
            self.count()

        Delivery._hear = hear_and_count  # type: ignore[assignment,method-assign]

    def tell(self, what: str, step: int, more: str = "") -> None:
        os.write(self._told, f"{what} {step} {more}\n".encode())

    def count(self) -> None:
        if next(self._counter) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, telling: Telling) -> None:
    """Go on from what there is, for a few steps."""
    torch.set_num_threads(1)
    training = Training(folder)
    found = training.saves.restore(training.state)
    step = 0 if found is None else found.step
    telling.tell("restored", step, "" if found is None else found.tier)
    for batch in training.data.counted(training.data):
        step += 1
        telling.tell("loss", step, training.step(batch).hex())
        training.saves.step(step, training.state)
        telling.count()
        # Every other save is on its way while the training goes on.
        training.saves.maybe_finalize(blocking=step % 2 == 0)
        if step % STEPS == 0:
            break
    training.saves.close()


def be_training(folder: Path, number: int, last: int) -> NoReturn:
    images = folder / "images"
    os.environ.update(EVERSTEP_IMAGES=str(images), EVERSTEP_ROUND=str(number))
    (images / "offer.json").write_text(json.dumps({"round": number, "complete": True}))
    try:
        train(folder, Telling(folder / f"told-{number}", last))
    except BaseException as error:
        (folder / f"error-{number}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


class Record:
    """What all trainings have told, held against what an undisturbed one would."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.lasting = 0
        self.wrong: list[str] = []

    def hear(self, number: int, line: str) -> None:
        what, step, *more = line.split()
        if what == "restored" and int(step) < self.lasting:
            self.wrong.append(f"round {number} restored {step}, and {self.lasting} had lasted")
        elif what == "lasts":
            self.lasting = max(self.lasting, int(step))
        elif what == "loss" and self.losses.setdefault(int(step), more[0]) != more[0]:
            self.wrong.append(f"round {number}: step {step} has another loss")


def main(folder: Path, kills: int, seed: int, most: int) -> None:
    chance, record = random.Random(seed), Record()
    (folder / "images").mkdir(mode=0o700)
    killed = number = 0
    while killed < kills and not record.wrong:
        number += 1
        last = chance.randint(1, most)
        child = os.fork()
        if not child:
            be_training(folder, number, last)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            record.wrong.append((folder / f"error-{number}").read_text())
        for line in (folder / f"told-{number}").read_text().splitlines():
            record.hear(number, line)
    said = {"killed": killed, "rounds": number, "steps": max(record.losses), "wrong": record.wrong}
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
