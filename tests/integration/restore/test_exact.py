"""A training that was restarted three times has, on every rank, what an undisturbed one has."""

import json
from pathlib import Path

import pytest

from tests.scripted import run
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints, verify

FEW = ["fsdp2/adamw/global", "ddp/nested/global", "pp+fsdp2/momentum/peer"]
SHARDINGS = {
    "fsdp2": True,
    "ddp": True,
    "hsdp": True,
    "tp": True,
    "tp+fsdp2": True,
    "pp+fsdp2 named": True,
    "pp+fsdp2": False,
    "experts": False,
    "fsdp2 by name": False,
    "fsdp2 compiled": True,
    "ddp compiled": True,
}
"""Whether the state of the optimizer has numbers, as `Optimizer.state_dict`, or names."""
OPTIMIZERS = [
    "adamw",
    "momentum",
    "nested",
    "sgd",
    "adam one by one",
    "adamw foreach",
    "adamw fused",
    "adam amsgrad",
    "nadam",
    "adagrad",
    "rmsprop",
]
TIERS = ["global", "memory", "peer"]


def differing(folder: Path, cases: list[str], others: list[str], within_s: float) -> list[str]:
    """What differs; `others` are also restored with two ranks, and then with four again."""
    words = json.dumps(cases), json.dumps(others)
    found: list[str] = run("../restore/exact_ranks.py", folder, *words, within_s=within_s)[
        "differing"
    ]
    return found


@pytest.mark.timeout(120)
def test_after_restarts_every_rank_has_what_it_would_have_without(tmp_path: Path) -> None:
    """One of four ranks has no rows of a parameter, and has its optimizer's state."""
    assert differing(tmp_path, FEW, FEW[:1], 110) == []
    storage = storage_for(str(tmp_path / "fsdp2_adamw_global/root"))
    verdicts = [verify(storage, one) for one in stored_checkpoints(storage)]
    assert [(one.flaw, one.doubt) for one in verdicts] == [("", "")] * 4


@pytest.mark.variant
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_restarts_change_nothing_for_any_optimizer_and_tier(tmp_path: Path, sharding: str) -> None:
    optimizers = [one for one in OPTIMIZERS if one != "nested" or SHARDINGS[sharding]]
    cases = [f"{sharding}/{optimizer}/{tier}" for optimizer in optimizers for tier in TIERS]
    others = [f"{sharding}/{one}/global" for one in optimizers]
    assert differing(tmp_path, cases, others, 1780) == []
