"""Real trainings with a fault: each gets the right verdict, and no restart waits for it."""

import signal

from tests.e2e.cluster import Body, Cluster
from tests.e2e.processes import SCRIPTS

LIMITS = ("--limit", "outside=4", "--limit", "backward=6")
TROUBLED = str(SCRIPTS / "troubled.py")


def verdict_of(cluster: Cluster, number: int = 1) -> Body:
    """The verdict about the incident of a round, as history shows it."""
    opened = cluster.until_fact("incident_opened", lambda body: body["round"] == number)

    def holds(found: list[Body]) -> list[Body]:
        return [one for one in found if one["incident"] == opened["incident"]]

    return holds(cluster.until_facts("verdict_reached", holds))[-1]


def test_a_rank_that_raises_is_the_culprit_and_its_peers_are_not(cluster: Cluster) -> None:
    """A user's error (A7.1, A11.1)."""
    cluster.run("--nproc-per-node", "4", TROUBLED, "raises", "2")
    verdict = verdict_of(cluster)
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("user_code", [2])
    assert verdict.get("culprit_nodes", []) == []
    assert "ValueError: batch 4 has no labels" in verdict["reason"]
    cluster.until_stepping(2)


def test_a_rank_that_is_killed_is_the_culprit_and_no_node_is(cluster: Cluster) -> None:
    """SIGKILL from outside: its peers fail as a consequence (A7.1)."""
    cluster.run("--nproc-per-node", "4", TROUBLED, "none", "0")
    cluster.until_stepping(1)
    cluster.kill_rank(3, 1, signal.SIGKILL)
    verdict = verdict_of(cluster)
    assert (verdict["cause"], verdict["kind"]) == ("unknown", "killed")
    assert (verdict["culprit_ranks"], verdict.get("culprit_nodes", [])) == ([3], [])
    cluster.until_stepping(2)


def test_a_rank_that_skips_a_collective_is_the_culprit(cluster: Cluster) -> None:
    """All wait, one of them elsewhere (A7.1); verdict within 5 s of the finding."""
    cluster.run("--nproc-per-node", "4", *LIMITS, TROUBLED, "skips", "1")
    verdict = verdict_of(cluster)
    assert verdict["culprit_ranks"] == [1], verdict
    assert verdict.get("culprit_nodes", []) == []
    assert verdict["cause"] == "user_code", verdict
    cluster.until_stepping(2)
