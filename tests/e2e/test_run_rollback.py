"""A training under its agent goes back, in place or by another round, and skips the same data."""

import json

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS

MADE = [
    *((step, (step - 1) * 8, step * 8) for step in range(1, 10)),
    (7, 48, 56),  # of the checkpoint after step 6
    *((step, (step + 2) * 8, (step + 3) * 8) for step in range(8, 17)),
]
"""The steps of each rank, with their data: that of steps 8 to 10 is used until it is suspect."""


@pytest.mark.parametrize(("way", "rounds"), [("in_place", 1), ("restart", 2)])
def test_a_training_goes_back_and_passes_over_the_same_data(
    cluster: Cluster, way: str, rounds: int
) -> None:
    """A restart for it is no failure: none is allowed here."""
    script = (str(SCRIPTS / "going_back.py"), str(cluster.folder), way)
    cluster.run("--nproc-per-node", "2", "--max-restarts", "0", *script)
    cluster.until_done()
    for rank in range(2):
        lines = (cluster.folder / f"steps-{rank}").read_text().splitlines()
        made = [(int(step), *json.loads(f"[{at[1:-1]}]")) for step, at in map(split, lines)]
        assert made == MADE
    formed = cluster.until_facts("round_formed")
    assert len(formed) == rounds
    causes = [
        (body["step"], body["tier"], body["cause"])
        for body in cluster.until_facts("checkpoint_quarantined")
    ]
    assert (8, "global", "numerics") in causes
    assert {cause for _, _, cause in causes} == {"numerics"}
    states = cluster.until_facts("checkpoint_restored")
    assert [body["step"] for body in states] == [6]
    assert len((json.loads((cluster.folder / "root/numerics.json").read_text()))["acts"]) == 1


def split(line: str) -> tuple[str, str]:
    step, _, at = line.partition(" ")
    return step, at
