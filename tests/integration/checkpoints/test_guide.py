"""The examples of the guide to checkpoints run as they stand."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from trainer_sdk import testing
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, decode
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints

GUIDE = Path(__file__).parents[3] / "docs/guides/checkpoints.md"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As a script that nobody has launched, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with testing.watched():
        yield


def example(with_: str) -> str:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (found,) = [one for one in blocks if with_ in one]
    return str(found)


def train(root: Path, last_step: int) -> None:
    """What the first example takes for granted, and that example."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def one(batch: torch.Tensor) -> Any:
        loss: Any = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    script = example("save_last(")
    assert script.count("/ckpt/llama") == 1
    given = {
        "DataLoader": DataLoader,
        "dataset": torch.randn(48, 4),
        "model": model,
        "optimizer": optimizer,
        "train": one,
        "last_step": last_step,
    }
    exec(script.replace("/ckpt/llama", str(root)), given)


def test_the_training_ends_with_its_last_step_saved_and_goes_on_from_there(tmp_path: Path) -> None:
    root = tmp_path / "llama"
    for last_step in (6, 12):
        train(root, last_step)
    found = stored_checkpoints(storage_for(str(root)))
    assert [one.step for one in found] == [12, 6]
    octets = (Path(found[0].path) / MANIFEST).read_bytes()
    assert decode(octets, Manifest, "").occasion == "end"


def test_the_queue_of_saves() -> None:
    exec(example("wait_for_files()  #"), {})
