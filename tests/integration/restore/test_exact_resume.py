"""A training that is killed and restored has the losses of an undisturbed one, bit for bit.

A cross-section without processes is in the unit tests of the data position.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.checkpoint_helpers import exact_resume
from tests.checkpoint_helpers.exact_training import DRAWS, HAS_TORCHDATA, LAST, Case
from tests.scripted import run

TORCHDATA = pytest.mark.skipif(not HAS_TORCHDATA, reason="torchdata is not installed")
LOADERS = [
    "positioned",
    pytest.param("positioned_stateful", marks=TORCHDATA),
    pytest.param("stateful", marks=TORCHDATA),
    "plain",
]


@pytest.mark.variant
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loader", LOADERS)
def test_no_loss_differs_after_five_kills(tmp_path: Path, loader: str, ranks: int) -> None:
    cases = [
        Case(loader, workers, draws, dropout, ranks=ranks)
        for workers, draws, dropout in product([0, 2], DRAWS, [0.0, 0.5])
        if (ranks == 1) == (draws != "all") and dropout + (ranks == 1)
    ]
    # Workers of a plain loader that persist would go on where the last epoch has left them.
    kept = loader != "plain"
    cases.append(Case(loader, 0, "all", shuffle=False, drop_last=True, ranks=ranks))
    cases.append(Case(loader, 2, "all", drop_last=True, persistent=kept, ranks=ranks))
    _check(cases, tmp_path)


def test_no_loss_of_three_ranks_differs_where_ddp_has_the_same_buckets(tmp_path: Path) -> None:
    """Of three summands the order counts, which DDP's buckets decide."""
    ways = ["kept", "before"]
    _check([Case(draws="all", ranks=3, buckets=buckets) for buckets in ways], tmp_path)


def _check(cases: list[Case], folder: Path) -> None:
    found = run(exact_resume.__file__, folder, json.dumps(cases), within_s=890)["cases"]
    assert len(found) == len(cases)
    for case, each in zip(cases, found, strict=True):
        assert each["made"] >= LAST * case.ranks
        assert each["differing"] == [], each
