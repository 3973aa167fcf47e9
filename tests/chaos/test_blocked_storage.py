"""Storage that takes nothing, really: steps go on, the delay of saves is reported, and ends end."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.checkpoint_helpers.frozen_disk import freezable
from tests.waiting import until
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.events import CheckpointEvent, DelayedEvent, Reporter

LEAVING = Path(__file__).parents[1] / "integration" / "scripts" / "leaving.py"
BLOCKED_S = 600.0
SETTLED_S = 30.0
EVERY = 20
MOST_SHARE = 0.02
MOST_GROWTH = 16 << 20


class Training:
    """A small real one that saves when it is due, and notes what its calls cost it."""

    def __init__(self, root: Path) -> None:
        model = torch.nn.Linear(1024, 1024)
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters())
        self._state = {"model": model, "optimizer": self._optimizer}
        self._number = 0
        self.saves = Checkpointer(root, every=EVERY)
        self.paid_s = 0.0

    def step(self) -> None:
        self._number += 1
        self._optimizer.zero_grad()
        self._model(torch.randn(256, 1024)).square().mean().backward()
        self._optimizer.step()
        called = time.monotonic()
        self.saves.step(self._number, self._state)
        self.paid_s += time.monotonic() - called
        assert self.saves.unfinished <= 1

    def go_on(self, for_s: float) -> tuple[int, int, int]:
        """Memory, descriptors and threads after this time."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            self.step()
        own = psutil.Process()
        return own.memory_info().rss, own.num_fds(), own.num_threads()

    def save_now(self) -> None:
        assert self.saves.save(self._number, self._state, wait=True).durable


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_ten_minutes_without_storage_cost_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps cost the same, the backlog is bounded, and the lag is recorded (A8.5)."""
    told: list[DelayedEvent] = []

    def report(_: Reporter, event: CheckpointEvent) -> None:
        if isinstance(event, DelayedEvent):
            told.append(event)

    monkeypatch.setattr(Reporter, "report", report)
    with freezable(tmp_path) as disk:
        training = Training(disk.path / "root")
        training.go_on(1.0)
        training.save_now()
        disk.freeze()
        training.paid_s = 0.0
        early = training.go_on(SETTLED_S)
        late = training.go_on(BLOCKED_S - SETTLED_S)
        assert training.paid_s / BLOCKED_S < MOST_SHARE
        assert late[0] < early[0] + MOST_GROWTH
        assert late[1:] == early[1:]
        assert told[-1].lag_s > BLOCKED_S / 3, "the delay is reported again as it grows"
        assert len(told) < 20, "and not all the time"
        disk.thaw()
        training.save_now()
        assert told[-1].waiting == 0
        training.saves.close()


@pytest.mark.chaos
def test_an_end_does_not_wait_for_a_disk_for_ever(tmp_path: Path) -> None:
    """The last save cannot become durable, so the exit code is 1 (A8.6)."""
    with freezable(tmp_path) as disk, (tmp_path / "said").open("w+") as said:
        done = subprocess.run(
            [sys.executable, LEAVING, disk.path / "root", "returns", "fatal", "freezes"],
            env=os.environ | {"EVERSTEP_ATTACH": "off"},
            stdout=subprocess.PIPE,
            stderr=said,  # the writer has it, too, and cannot be killed before the disk is back
            text=True,
            timeout=50,
            check=False,
        )
        writer, images = done.stdout.split()
        assert done.returncode == 1
        assert psutil.pid_exists(int(writer))
        disk.thaw()
        until(lambda: not psutil.pid_exists(int(writer)), "the end of the writer")
        shutil.rmtree(Path(images).parents[1])
        said.seek(0)
        assert "so the exit code is 1" in said.read()
