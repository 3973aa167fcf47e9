"""A training goes back in place, passes over batches, and trains as if it had never seen them."""

import json
from pathlib import Path

import pytest

from tests.checkpoint_helpers import rolled_back
from tests.checkpoint_helpers.exact_training import HAS_TORCHDATA
from tests.checkpoint_helpers.rolled_back import BACK_TO, KILLS, MOVED_AT, Trial
from tests.scripted import run

LOADERS = ["positioned", "stateful"] if HAS_TORCHDATA else ["positioned"]


def check(trials: list[Trial], folder: Path) -> None:
    """Each loss of each trial is right, and the act is recorded once."""
    found = run(rolled_back.__file__, folder, json.dumps(trials), within_s=230)["trials"]
    assert len(found) == len(trials)
    for trial, each in zip(trials, found, strict=True):
        assert each["differing"] == [], (trial, each)
        assert len(each["spans"]) == 1, (trial, each)
        assert each["launches"] == (2 if trial.kill else 1), (trial, each)
        # Before the act is recorded, nobody knows that the newest checkpoint is suspect.
        again = [MOVED_AT if trial.kill == "decided" else BACK_TO] * bool(trial.kill)
        assert each["began"] == [0, *again], (trial, each)


def test_losses_are_those_of_a_training_that_never_saw_the_batches(tmp_path: Path) -> None:
    trials = [
        Trial("positioned", 2, "ddp", "memory"),
        Trial("positioned", 0, "fsdp2", "global"),
        Trial(LOADERS[-1], 2, "ddp", "both"),
    ]
    check(trials, tmp_path)


@pytest.mark.variant
@pytest.mark.parametrize("tier", ["global", "memory", "both"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_the_same_for_every_loader(tmp_path: Path, sharding: str, tier: str) -> None:
    loaders = [*LOADERS, "positioned_stateful"] if HAS_TORCHDATA else LOADERS
    trials = [
        Trial(loader, workers, sharding, tier, ranks)
        for loader in loaders
        for workers in (0, 2)
        for ranks in (1, 2)
    ]
    check([*trials, Trial(sharding=sharding, tier=tier, ranks=3)], tmp_path)


def test_a_kill_at_any_point_neither_skips_twice_nor_restores_a_suspect(tmp_path: Path) -> None:
    trials = [
        Trial("positioned", tier="both", kill="decided"),
        Trial("positioned", sharding="fsdp2", tier="global", kill="recorded"),
        Trial(LOADERS[-1], tier="memory", kill="marked"),
        Trial(LOADERS[-1], tier="global", kill="quarantined"),
        Trial("positioned", 2, tier="memory", kill="restored"),
        Trial(LOADERS[-1], tier="both", kill="stepped"),
        Trial("positioned", tier="global", kill="stepped", later=3),
    ]
    assert {trial.kill for trial in trials} == {*KILLS, "stepped"}
    check(trials, tmp_path)
