"""A sharded state goes on in another process group, bit for bit: on real ranks."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "carried.py"
WORLD, BROKEN_RANK = 4, 1
KINDS = [
    pytest.param("fsdp", marks=pytest.mark.variant),  # HSDP shows more
    "hsdp",
    pytest.param("tensor", marks=pytest.mark.variant),
    "tensor and data",
]

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("carried")]


@cache
def ranks(kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(SCRIPT), kind, folder], timeout=170, check=True)
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(WORLD)]
        told: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    failures = [each["failed"] for each in told if "failed" in each]
    assert not failures, "\n".join(failures)
    return told


@pytest.mark.parametrize("moment", ["between", "forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_an_undisturbed_training(kind: str, moment: str) -> None:
    for rank, told in enumerate(ranks(kind)):
        own = told[moment]
        assert own["unfit"] == ""
        assert own["losses"] == told["undisturbed"]["losses"]
        assert own["digest"] == told["undisturbed"]["digest"]
        assert bool(own["error"]) == (moment != "between")
        if rank == BROKEN_RANK and own["error"]:
            assert own["error"] == moment


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_taken_over_and_nothing_of_former_groups_is_kept(kind: str) -> None:
    for told in ranks(kind):
        assert told["between"]["moved"] > 0.8
        assert all(told[moment]["is_freed"] for moment in ("between", "forward", "backward"))
        assert len(set(told["repeated"])) == 1


def test_a_state_that_does_not_fit_is_left_as_it_was_made() -> None:
    for told in ranks("hsdp"):
        assert "model.second.weight was torch.float32 [8, 16]" in told["unfit"]["unfit"]
        assert told["unfit"]["is_fresh"]


def test_a_replica_group_goes_on_alone() -> None:
    for told in ranks("hsdp")[:2]:
        assert told["shrunk"] == {"unfit": "", "is_same": True, "losses": 4}
