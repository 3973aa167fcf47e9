"""A training that is killed with its writer again and again, and goes on from what there is.

`killed_training.py FOLDER N SEED MOST [URL]` kills it N times: at a random count, of MOST at most,
of its steps and of the lines that its writer says; or, half of the time, of the pieces of a state
that it has copied, once its writer has written some of that state. It saves below FOLDER, also into
memory, or into the object store alone. Torch is imported once; each training is forked from here.
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
from xxhash import xxh3_128_hexdigest

from tests.checkpoint_helpers.killing_server import sent
from tests.checkpoint_helpers.small_pieces import PIECE_BYTES
from tests.scripted import apart
from tests.waiting import until
from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler, RngState
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.save import staging, writer_process
from trainer_sdk.checkpoint.save.request import Save
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints, verify
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.writer.protocol import ImageKept, SaveDone, WriteState

DATA = torch.arange(64 * 16).view(64, 16).sin()
STEPS = 12
"""What each of them makes, unless it is killed."""
PIECES = 10
"""The most of them that are copied before a kill; a save has five at least."""


class Training:
    def __init__(self, root: str, *, is_lazy: bool) -> None:
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 1024), torch.nn.Dropout(0.3), torch.nn.Linear(1024, 3)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.data = PositionedSampler(len(DATA), batch_size=4, seed=2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.data,
            "random": RngState(),
        }
        self.saves = Checkpointer(
            root,
            job="killed",
            every=3,
            memory_every=0 if "://" in root else 1,
            on_error="fatal",
            lazy=is_lazy,
        )

    def step(self, batch: list[int]) -> float:
        loss = self.model(DATA[batch]).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Telling:
    """Tells each step, and what lasts of it; kills itself at the `last`-th time.

    With `amid`, what is counted are pieces, and nothing else is.
    """

    def __init__(self, path: Path, last: int, *, amid: bool) -> None:
        self._told = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._counter = count(1)
        self._last = last
        self._amid = amid
        hear, filled = SaveQueue._receive, SaveQueue.filled

        def hear_and_count(queue: SaveQueue, line: Any) -> None:
            save = queue._saves.get(line.save)
            if (
                save is not None
                and save.step is not None
                and isinstance(line, (SaveDone, ImageKept))
            ):
                self.tell("lasts", save.step)
            hear(queue, line)
            self.count()

        def fill_and_count(queue: SaveQueue, save: Save, end: int) -> None:
            filled(queue, save, end)
            if self._amid and save.is_filling and save.is_sent and next(self._counter) == last:
                until(lambda: _has_begun(save), "the writer has written some", despite=OSError)
                self.tell("amid", save.step or 0)
                os.kill(os.getpid(), signal.SIGKILL)

        SaveQueue._receive = hear_and_count  # type: ignore[assignment,method-assign]
        SaveQueue.filled = fill_and_count  # type: ignore[assignment,method-assign]

    def tell(self, what: str, step: int, more: str = "") -> None:
        os.write(self._told, f"{what} {step} {more}\n".encode())

    def count(self) -> None:
        if not self._amid and next(self._counter) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


def _has_begun(save: Save) -> bool:
    order = save.order
    assert isinstance(order, WriteState)
    if "://" in order.root:
        return sent(order) > 0
    return Path(order.root, SAVING, order.saving, f".{order.shard}").stat().st_size > 0


def train(training: Training, telling: Telling) -> None:
    """Go on from what there is, for a few steps."""
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


def be_training(
    folder: Path, root: str, number: int, telling: Telling, *, is_lazy: bool
) -> NoReturn:
    images = folder / "images"
    os.environ.update(EVERSTEP_IMAGES=str(images), EVERSTEP_ROUND=str(number))
    (images / "offer.json").write_text(json.dumps({"round": number, "complete": True}))
    try:
        torch.set_num_threads(1)
        train(Training(root, is_lazy=is_lazy), telling)
    except BaseException as error:
        (folder / f"error-{number}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


class Record:
    """What all trainings have told, held against what an undisturbed one would."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.lasting = 0
        self.amid = 0
        self.steps = 0
        """Of the round that was heard last."""
        self.wrong: list[str] = []

    def hear(self, number: int, line: str) -> None:
        what, step, *more = line.split()
        if what == "restored" and int(step) < self.lasting:
            self.wrong.append(f"round {number} restored {step}, and {self.lasting} had lasted")
        elif what == "lasts":
            self.lasting = max(self.lasting, int(step))
        elif what == "amid":
            self.amid += 1
        elif what == "loss":
            self.steps += 1
            if self.losses.setdefault(int(step), more[0]) != more[0]:
                self.wrong.append(f"round {number}: step {step} has another loss")

    def look(self, folder: Path, root: str, number: int) -> None:
        """What names itself whole is."""
        for path in (folder / "images" / "own").rglob(INDEX):
            index = decode(path.read_bytes(), ImageIndex, str(path))
            octets = (path.parent / IMAGE).read_bytes()[: index.size_bytes]
            if xxh3_128_hexdigest(octets) != index.hash:
                self.wrong.append(f"round {number}: {path} is of another image")
        for step, flaw in apart(lambda: flaws(root)):
            self.wrong.append(f"round {number}: step {step} can be seen: {flaw}")


def flaws(root: str) -> list[tuple[int, str]]:
    """Of the newest two that can be seen."""
    storage = storage_for(root)
    read = [(one.step, verify(storage, one).flaw) for one in stored_checkpoints(storage)[:2]]
    return [(step, flaw) for step, flaw in read if flaw]


def main(folder: Path, root: str, kills: int, seed: int, most: int) -> None:
    chance, record = random.Random(seed), Record()
    (folder / "images").mkdir(mode=0o700)
    staging._PIECE_BYTES, writer_process._MODULE = (
        PIECE_BYTES,
        "tests.checkpoint_helpers.small_pieces",
    )
    killed = number = 0
    while killed < kills and not record.wrong:
        number += 1
        amid, is_lazy = chance.random() < 0.5, chance.random() < 0.5
        last = chance.randint(1, PIECES if amid else most)
        child = os.fork()
        if not child:
            telling = Telling(folder / f"told-{number}", last, amid=amid)
            be_training(folder, root, number, telling, is_lazy=is_lazy)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            record.wrong.append((folder / f"error-{number}").read_text())
        record.steps = 0
        for line in (folder / f"told-{number}").read_text().splitlines():
            record.hear(number, line)
        if amid and os.WIFEXITED(status) and record.steps == STEPS:
            record.wrong.append(f"round {number}: there was no piece {last} to be killed at")
        record.look(folder, root, number)
    said = {"killed": killed, "amid": record.amid, "rounds": number, "wrong": record.wrong}
    print(json.dumps(said | {"steps": max(record.losses)}))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    url = sys.argv[5] if sys.argv[5:] else str(place / "root")
    main(place, url, *map(int, sys.argv[2:5]))
