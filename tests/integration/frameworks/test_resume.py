"""A toy of each framework trains, saves, and resumes from the newest checkpoint that is good."""

from pathlib import Path

import pytest

from tests.integration.frameworks.ranks import launch
from tests.variants import first_of
from trainer_sdk.integrations import seals

SCRIPTS = {
    "lightning": "lightning_toy.py",
    "transformers": "hugging_face.py",
    "accelerate": "accelerate_toy.py",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", first_of(("transformers", "lightning"), SCRIPTS))
def test_a_training_resumes_from_the_newest_good_checkpoint(framework: str, tmp_path: Path) -> None:
    """It trains 10 steps, and a bit of step 10 flips: it resumes at 5, and trains to 15 (A8.8)."""
    pytest.importorskip(framework, reason=f"pip install --group test brings {framework}")
    printed = launch(SCRIPTS[framework], str(tmp_path), "10", "15", ranks=1)
    assert "differs from what was saved" in printed
    steps = [int(line.split()[1]) for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert steps == [*range(1, 11), *range(6, 16)]
    states = [seals.check(path).state for path in _checkpoints(tmp_path / "checkpoints")]
    assert states.count("good") >= 2


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_finished_training_trains_no_step_when_it_is_started_again(tmp_path: Path) -> None:
    """Step 10 is in the middle of an epoch, where a `Trainer` would train step 11."""
    pytest.importorskip("transformers", reason="pip install --group test brings transformers")
    printed = launch("hugging_face.py", str(tmp_path), "10", "10", UNDAMAGED="1")
    assert "it resumes at step 10, and max_steps is 10; raise max_steps to train on" in printed
    assert printed.count("done at 10") == 2
    assert len((tmp_path / "steps-0").read_text().splitlines()) == 10


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_resumed_training_of_hugging_face_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """With dropout, and samples in random order."""
    pytest.importorskip("transformers", reason="pip install --group test brings transformers")
    whole, resumed = (
        [
            line
            for line in launch(
                "hugging_face.py", str(tmp_path / steps[0]), *steps, UNDAMAGED="1", DROPOUT="0.3"
            ).splitlines()
            if line.startswith("loss ")
        ]
        for steps in (("20",), ("10", "20"))
    )
    assert len(whole) == 20
    assert resumed == whole


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_lightning_with_too_few_devices_trains_and_names_the_remedy(tmp_path: Path) -> None:
    """A callback that fails is one warning, and the training continues."""
    pytest.importorskip("lightning", reason="pip install --group test brings lightning")
    printed = launch("lightning_toy.py", str(tmp_path), "6", ranks=2, DEVICES="1", LOCAL_EVERY="2")
    assert printed.count("give Trainer(devices=2, num_nodes=1)") == 2
    assert printed.count("done at 6") == 2


def _checkpoints(folder: Path) -> list[Path]:
    return [place for place in folder.iterdir() if "seal" not in place.name]
