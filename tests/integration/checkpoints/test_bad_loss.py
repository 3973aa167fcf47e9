"""A loss that is not a number while a save of the same training is still on its way."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint_helpers.saved_by import JOB, UNHURRIED
from tests.stopping import stop
from tests.waiting import until
from trainer_sdk import layout, testing
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.restore.quarantine import BadLossError
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    with testing.watched():
        yield


def is_quarantined(root: Path, step: int) -> bool | None:
    """None while it cannot be seen."""
    there = look(storage_for(str(root)), step)
    return None if there is None else there.quarantined is not None


def begun(root: Path) -> Checkpointer:
    return Checkpointer(root, job=JOB, timeouts=UNHURRIED)


def test_what_becomes_visible_later_is_quarantined_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = tmp_path / "root", {"a": torch.zeros(9)}
    monkeypatch.setenv(layout.ROUND_VARIABLE, "1")
    with begun(root) as saves:
        for step in (5, 10):
            saves.save(step, state, wait=True)

    def go_on() -> None:
        until(lambda: is_quarantined(root, 10), "the mark of what was loaded")
        os.kill(pid, signal.SIGCONT)

    monkeypatch.setenv(layout.ROUND_VARIABLE, "2")
    going_on = threading.Thread(target=go_on)
    with pytest.raises(BadLossError, match="after loading step 10"), begun(root) as saves:
        saves.restore(state)
        pid = until(lambda: saves._queue.writer_pid, "a writer")
        stop(pid)
        saves.save(11, state)
        assert is_quarantined(root, 11) is None
        going_on.start()
        saves.check_loss(math.nan)
    going_on.join()
    assert is_quarantined(root, 11)
    with begun(root) as saves:
        found = saves.restore(state)
        assert found is not None
        assert found.step == 5
