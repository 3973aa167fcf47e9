"""Steps with wrong results under an agent: what is on record, and kills while they run again."""

from collections import defaultdict
from pathlib import Path

import pytest

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Cluster
from tests.e2e.operators import command, operator
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


def test_a_result_that_was_wrong_once_is_an_incident_with_its_story(cluster: Cluster) -> None:
    """From the datagrams of rank 0 through logins, agent and record to what people read."""
    agent = cluster.run("--nproc-per-node", "2", str(SCRIPTS / "wrong_once.py"))
    assert agent.wait(ENDS_WITHIN_S) == 0
    acted = cluster.until_fact("numerics_acted")
    (suspected,), (judged,) = (
        cluster.facts(f"numerics_{kind}") for kind in ("suspected", "judged")
    )
    assert (suspected["step"], suspected["signal"], suspected["rank"]) == (5, "nan", 1)
    assert (judged["kind"], judged["ranks"]) == ("transient", [1])
    assert (acted["action"], acted["outcome"]) == ("again", "done")
    (node,) = set(cluster.members(1).values())
    assert judged["node"] == node
    (closed,) = cluster.closed(1)
    assert {it["incident"] for it in (suspected, judged, acted)} == {closed["incident"]}
    assert closed["outcome"] == "recovered"
    (case,) = cluster.api.get(f"jobs/{cluster.job}/numerics")["items"]
    assert (case["kind"], case["case"]) == ("transient", judged["case"])
    environ = operator(cluster.plane, cluster.folder)
    told = command(environ, "why", cluster.job, "--api", cluster.plane.api)
    assert told.returncode == Exit.OK, told.stderr
    assert "  At step 5 the loss or the gradient norm is not a number on rank 1\n" in told.stdout
    assert "  The training made the step again\n" in told.stdout


def losses_of(file: Path) -> dict[int, set[str]]:
    """Those of each step; more than one if the training went another way after a restart."""
    losses: dict[int, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines():
        step, loss = line.split()
        losses[int(step)].add(loss)
    return losses
