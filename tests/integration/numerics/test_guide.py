"""The loop of the guide to numerics runs as it stands."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_sdk import testing
from trainer_sdk.checkpoint import PositionedSampler
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints

GUIDE = Path(__file__).parents[3] / "docs/guides/numerics.md"
DATA = "torch.randn(512, 4)"
STEPS, EVERY, BATCH = 100, 20, 8


@pytest.fixture
def watch() -> Iterator[testing.Watch]:
    """The page of a session without an agent."""
    with testing.watched() as watch:
        yield watch


def train(root: Path, **replaced: str) -> dict[str, Any]:
    """Run the example; returns its names."""
    (script,) = re.findall(
        r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S
    )
    for written, other in {"/ckpt/llama": str(root), **replaced}.items():
        assert script.count(written) == 1
        script = script.replace(written, other)
    names: dict[str, Any] = {}
    exec(script, names)
    return names


def saved_steps(root: Path) -> list[int]:
    return [there.step for there in stored_checkpoints(storage_for(str(root)))]


def test_a_healthy_training_uses_all_of_its_data(watch: testing.Watch, tmp_path: Path) -> None:
    names = train(tmp_path / "llama")
    assert watch.step == STEPS
    assert names["sampler"].consumed == STEPS * BATCH
    assert max(saved_steps(tmp_path / "llama")) == STEPS


def test_batches_that_break_it_are_gone_back_over_and_skipped(
    watch: testing.Watch, tmp_path: Path
) -> None:
    """In place: no other sample of the stream is left out, and the training makes all its steps."""
    order = next(iter(PositionedSampler(512, batch_size=2 * 512, seed=1)))
    poisoned = order[56 * BATCH]
    poison = f"torch.randn(512, 4) * (1 + 1e6 * (torch.arange(512) == {poisoned})).unsqueeze(1)"
    names = train(tmp_path / "llama", **{DATA: poison})
    acts = json.loads((tmp_path / "llama/numerics.json").read_bytes())["acts"]
    assert [act["action"] for act in acts] == ["skip", "skip"]
    batches = [at // BATCH for at, sample in enumerate(order) if sample == poisoned]
    assert [act["samples"] for act in acts] == [[at * BATCH, (at + 1) * BATCH] for at in batches]
    assert watch.step == STEPS
    assert names["sampler"].consumed == (STEPS + 2) * BATCH
