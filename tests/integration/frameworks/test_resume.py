"""A toy of each framework trains, saves, and resumes from the newest checkpoint that is good."""

from pathlib import Path

import pytest

from tests.integration.frameworks.ranks import launch
from trainer_sdk.integrations import seals

SCRIPTS = {
    "lightning": "lightning_toy.py",
    "transformers": "hugging_face.py",
    "accelerate": "accelerate_toy.py",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_training_resumes_from_the_newest_good_checkpoint(framework: str, tmp_path: Path) -> None:
    """It trains 10 steps, and a bit of step 10 flips: it resumes at 5, and trains to 15 (A8.8)."""
    pytest.importorskip(framework, reason=f"pip install --group test brings {framework}")
    printed = launch(SCRIPTS[framework], str(tmp_path), "10", "15", ranks=1)
    assert "differs from what was saved" in printed
    steps = [int(line.split()[1]) for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert steps == [*range(1, 11), *range(6, 16)]
    states = [seals.check(path).state for path in _checkpoints(tmp_path / "checkpoints")]
    assert states.count("good") >= 2


def _checkpoints(folder: Path) -> list[Path]:
    return [place for place in folder.iterdir() if "seal" not in place.name]
