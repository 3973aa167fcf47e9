"""A training under its agent goes back, in place or by another round, and skips the same data."""

import json

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS

MADE = [
    *((step, step * 8) for step in range(1, 8)),
    (7, 56),  # again, of the checkpoint after step 6
    *((step, step * 8 + 8) for step in range(8, 15)),
]
"""The steps of each rank, and the position in the data after each."""


@pytest.mark.parametrize(("way", "rounds"), [("in_place", 1), ("restart", 2)])
def test_a_training_goes_back_and_passes_over_the_same_data(
    cluster: Cluster, way: str, rounds: int
) -> None:
    """A restart for it is not a failure: none is allowed here."""
    script = (str(SCRIPTS / "going_back.py"), str(cluster.folder), way)
    cluster.run("--nproc-per-node", "2", "--max-restarts", "0", *script)
    cluster.until_done()
    for rank in range(2):
        lines = (cluster.folder / f"steps-{rank}").read_text().splitlines()
        assert [tuple(map(int, line.split())) for line in lines] == MADE
    assert len(cluster.until_facts("round_formed")) == rounds
    assert [body["step"] for body in cluster.until_facts("checkpoint_restored")] == [6]
    (act,) = json.loads((cluster.folder / "root/numerics.json").read_text())["acts"]
    assert (act["action"], act["samples"], act["is_quarantined"]) == ("skip", [56, 64], True)
    acted = cluster.until_fact("numerics_acted")
    assert (acted["action"], acted["outcome"]) == ("skip", "done")
    assert (acted["samples_from"], acted["samples_to"]) == (56, 64)
    incident = cluster.own_incident()
    assert (incident["trigger"], incident["outcome"]) == ("numerics", "recovered")
    assert incident["next_round"] == rounds
    assert incident["lost_steps"] == cluster.state()["lost_steps"] == 1
