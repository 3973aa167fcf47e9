"""Saves to the global tier whose state changes, and whose writer dies, while it is being copied.

At once, or in waves: then the training waits for the copy, and a writer that dies fails the save.
"""

import os
import random
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import Saving, load, path_of, same, saving
from tests.checkpoint_helpers.small_pieces import PIECE_BYTES
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.save import staging, writer_process
from trainer_sdk.checkpoint.save.request import Save
from trainer_sdk.checkpoint.save.save_queue import SaveQueue

FIRST_PIECES = 4
"""How many pieces of each save a writer hears of while a state is copied."""


@dataclass
class Seen:
    """What became of the saves."""

    refused: int = 0
    ahead: int = 0
    """Saves that a writer had heard of before all was copied."""
    killed: int = 0
    """Whose writer was killed while they were copied."""


class Training:
    def __init__(self, values: int) -> None:
        self.weights = [torch.nn.Parameter(torch.randn(values)) for _ in range(6)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1, momentum=0.9)
        self.own = torch.zeros(999)
        self.step()
        self.state: dict[str, Any] = {"own": self.own}
        for number, one in enumerate(self.weights):
            self.state[f"weight{number}"] = one
            self.state[f"momentum{number}"] = self.optimizer.state[one]["momentum_buffer"]

    def step(self) -> None:
        for one in self.weights:
            one.grad = torch.full_like(one, 0.01)
        self.optimizer.step()

    def change(self, dice: random.Random) -> None:
        """As nothing that torch counts."""
        one = dice.choice([self.state[key] for key in self.state if key != "own"])
        if dice.random() < 0.5:
            one.data.add_(1)
        else:
            one.detach().numpy()[...] = dice.random()


class Meanwhile:
    """What happens to each save when some of its pieces are copied, or right after the call."""

    def __init__(self, rank: Saving, training: Training, *, waits: bool) -> None:
        self.what = ""
        self.is_ahead = False
        """The writer has heard of this save before all of it was copied."""
        self._rank = rank
        self._training = training
        self._waits = waits
        self._dice = random.Random(7)
        self._pieces_left = 0
        self._has_come = threading.Event()

    def begin(self) -> None:
        """Choose for the next save."""
        self.what = self._dice.choice(("change", "kill", "", ""))
        self.is_ahead = False
        self._pieces_left = self._dice.randint(1, FIRST_PIECES)
        self._has_come.clear()

    def hear(self, save: Save) -> None:
        """A piece has been copied; the copy waits for this."""
        self.is_ahead |= save.is_filling
        self._pieces_left -= 1
        if self._pieces_left:
            return
        if self.what == "kill":
            os.kill(self._rank.writer, signal.SIGKILL)
        elif self.what == "change" and self._waits:
            self._training.change(self._dice)
        self._has_come.set()

    def go_on(self) -> None:
        """Save has returned: later changes do not belong to the state."""
        self._training.own.fill_(self._dice.random())
        if self.what == "change":
            assert self._has_come.wait(30)
            if not self._waits:
                self._training.change(self._dice)
        for _ in range(self._dice.randrange(3)):
            self._training.step()


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the copy, and in what its writer writes."""
    monkeypatch.setattr(staging, "_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(writer_process, "_MODULE", "tests.checkpoint_helpers.small_pieces")


def save_in_small_pieces(monkeypatch: pytest.MonkeyPatch, saves: int, *, is_lazy: bool) -> Seen:
    """A writer begins each of them early."""
    small_pieces(monkeypatch)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seen = save_and_change(
            Path(folder), monkeypatch, saves=saves, values=12 << 10, is_lazy=is_lazy
        )
    assert seen.ahead == saves
    return seen


def save_in_waves(monkeypatch: pytest.MonkeyPatch, saves: int) -> Seen:
    """There is room for an eighth of each state at a time."""
    small_pieces(monkeypatch)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return save_and_change(
            Path(folder),
            monkeypatch,
            saves=saves,
            values=12 << 10,
            is_lazy=True,
            memory_limit=10 * PIECE_BYTES,
        )


def save_and_change(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    saves: int,
    values: int,
    is_lazy: bool,
    races: bool = False,
    memory_limit: int = 0,
) -> Seen:
    """Each save is the state at the call, or is refused since that has changed.

    A change that `races` comes while a lazy copy goes on; else that waits for it.
    """
    training, seen, in_waves = Training(values), Seen(), memory_limit > 0
    with saving(
        folder,
        keeps=not in_waves,
        buffers=1 if in_waves else 2,
        memory_limit=memory_limit,
        is_lazy=is_lazy,
        on_error="retry",
        optimizers=(training.optimizer,),
    ) as rank:
        meanwhile = Meanwhile(rank, training, waits=is_lazy and not races and not in_waves)
        _heard_by(meanwhile, monkeypatch)
        for step in range(1, saves + 1):
            expected = {key: one.detach().clone() for key, one in training.state.items()}
            rank.queue.warm()
            rank.saver._is_lazy = is_lazy  # a save that was refused has turned it off
            meanwhile.begin()
            assert rank.save(step, training.state) is not None
            meanwhile.go_on()
            is_saved = bool(rank.finish())
            is_killed, is_changed = (meanwhile.what == one for one in ("kill", "change"))
            if in_waves:
                assert is_saved is not is_killed, f"step {step}: {rank.told.warned}"
            elif not (is_changed and is_lazy):
                assert is_saved, f"step {step}: {rank.told.warned}"
            elif not races:
                assert not is_saved, f"step {step} was saved, and had changed"
            why = "died by signal 9" if in_waves else "was changed before"
            assert is_saved or why in rank.told.warned.pop()
            _check(folder, step, expected if is_saved else None, is_kept=not in_waves)
            shutil.rmtree(path_of(folder, step), ignore_errors=True)
            seen.ahead += meanwhile.is_ahead
            seen.killed += is_killed
            seen.refused += not is_saved
        assert not list((folder / "root").glob("step-*")), "what was refused is never visible"
    return seen


def _heard_by(meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = SaveQueue.filled

    def fill(queue: SaveQueue, save: Save, end: int) -> None:
        filled(queue, save, end)
        meanwhile.hear(save)

    monkeypatch.setattr(SaveQueue, "filled", fill)


def _check(
    folder: Path, step: int, expected: dict[str, torch.Tensor] | None, *, is_kept: bool
) -> None:
    """It is there, and its image, if that is kept; or neither is."""
    image = dict(_image(one) for one in (folder / "images").rglob(INDEX)).get(step)
    if expected is None:
        assert not path_of(folder, step).exists()
        assert image is None, f"the image of step {step}"
        return
    blank = {key: torch.zeros_like(one) for key, one in expected.items()}
    assert same(load(folder, step, blank), expected), f"step {step}"
    if is_kept:
        expected_image = {key: one.numpy().tobytes() for key, one in expected.items()}
        assert image == expected_image, f"step {step}"


def _image(path: Path) -> tuple[int, dict[str, bytes]]:
    index = decode(path.read_bytes(), ImageIndex, str(path))
    octets = (path.parent / IMAGE).read_bytes()
    found = {one.key: octets[one.offset : one.offset + one.length] for one in index.entries}
    return index.identity.step, found
