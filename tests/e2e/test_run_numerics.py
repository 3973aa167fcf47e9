"""A rank is killed while steps are run again, and the training goes on as if nothing had been."""

from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS

STEPS, KILLS = 24, 3
ENDS_WITHIN_S = 240.0


@pytest.mark.timeout(300)
def test_kills_while_steps_are_run_again_change_no_loss(cluster: Cluster) -> None:
    script = (str(SCRIPTS / "killed_numerics.py"), str(cluster.folder))
    agent = cluster.run("--nproc-per-node", "2", "--max-restarts", "none", *script)
    assert agent.wait(ENDS_WITHIN_S) == 0
    assert [fact["round"] for fact in cluster.facts("round_formed")] == list(range(1, KILLS + 2))
    for rank in range(2):
        losses = losses_of(cluster.folder / f"losses-{rank}")
        assert sorted(losses) == list(range(1, STEPS + 1))
        assert all(len(of_step) == 1 for of_step in losses.values())


def losses_of(file: Path) -> dict[int, set[str]]:
    """Those of each step; more than one if the training went another way after a restart."""
    losses: dict[int, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        step, loss = line.split()
        losses[int(step)].add(loss)
    return losses
