"""Real ranks, killed and started again: each round goes on bit for bit from the nearest state."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "restoring.py"
Seen = dict[tuple[int, int], dict[str, Any]]
"""By round and rank."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("restoring")
    done = subprocess.run(
        [sys.executable, SCRIPT, folder], capture_output=True, text=True, timeout=100, check=False
    )
    assert not done.returncode, done.stderr
    return {
        (number, rank): json.loads(path.read_text())
        for number in range(1, 6)
        for rank in range(2)
        if (path := folder / f"round-{number}-rank-{rank}.json").exists()
    }


@pytest.mark.timeout(120)
def test_no_rank_has_failed(seen: Seen) -> None:
    assert len(seen) == 9
    assert [one["error"] for one in seen.values() if "error" in one] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "tiers"), [(2, ["memory"] * 2), (3, ["memory", "global"]), (4, ["memory", "global"])]
)
def test_the_losses_after_a_restore_are_those_of_the_undisturbed_training(
    seen: Seen, number: int, tiers: list[str]
) -> None:
    for rank, tier in enumerate(tiers):
        found = seen[number, rank]
        assert (found["step"], found["tier"]) == (8, tier)
        assert found["losses"] == seen[1, rank]["losses"][8:]


@pytest.mark.timeout(120)
def test_a_flipped_bit_is_told_on_all_ranks(seen: Seen) -> None:
    """One rank's image is damaged, and every rank knows (A8.8)."""
    for rank in range(2):
        [reason] = seen[3, rank]["passed"]
        assert "rank-1" in reason
        assert "differs from what was saved" in reason


@pytest.mark.timeout(120)
def test_one_rank_reads_what_two_have_saved(seen: Seen) -> None:
    assert (seen[5, 0]["step"], seen[5, 0]["tier"]) == (8, "global")
    assert seen[5, 0]["weights"] == pytest.approx(seen[2, 0]["weights"], rel=1e-9)
    assert "a world of size 2" in seen[5, 0]["passed"][0]
