"""One of 64 ranks raises, and 63 lose their connections: the one is named."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.e2e.processes import SCRIPTS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
NODES, RANKS, ROUNDS = 8, 8, 20
_ROUND_WITHIN_S = 300.0
"""64 interpreters are started for each."""


@pytest.fixture
def cluster(tmp_path: Path, job: str) -> Iterator[Cluster]:
    for folder in (tmp_path / "up", tmp_path / job):
        folder.mkdir()
    with running_up(tmp_path / "up", **PATIENT) as up:
        made = Cluster(tmp_path / job, job, up)
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("way", ["at once", "closing"])
def test_of_64_ranks_on_8_nodes_the_one_that_raised_is_named(
    cluster: Cluster, dice: random.Random, way: str
) -> None:
    """Each round in which 64 ranks fail is one incident (A4.5, A11.5)."""
    for number in range(NODES):
        cluster.run(
            *("--cold", "--nnodes", str(NODES), "--nproc-per-node", str(RANKS)),
            *("--max-restarts", "none", "--no-progress-limit", "none", "--console", "none"),
            *(str(SCRIPTS / "secondary.py"), str(cluster.folder), way),
            node=f"node-{number}",
        )
    raised = []
    for restart in range(ROUNDS):
        cluster.until_stepping(restart + 1, _ROUND_WITHIN_S)
        raised.append(dice.randrange(NODES * RANKS))
        (cluster.folder / f"raise-{restart}-{raised[-1]}").touch()
    cluster.until_stepping(ROUNDS + 1, _ROUND_WITHIN_S)
    incidents = cluster.closed(ROUNDS)
    cluster.finish()
    cluster.until_done()
    assert len(incidents) == ROUNDS
    wrong = [
        (rank, incident["rank"], incident["story"])
        for rank, incident in zip(raised, incidents, strict=True)
        if incident["rank"] != rank
    ]
    print(f"the one that raised was named {ROUNDS - len(wrong)} times of {ROUNDS}")
    assert not wrong, wrong
