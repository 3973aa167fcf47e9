"""What is on record about a broken round: what was decided, and what its ranks were doing."""

from tests.e2e.cluster import Body, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import SCRIPTS
from tests.waiting import until


def recovered(cluster: Cluster) -> Body:
    """The story of a rank that was killed, once its job has ended well."""
    # Ranks that do not meet: rank 0 lives until it is stopped.
    script = (str(SCRIPTS / "family.py"), str(cluster.folder), "0")
    cluster.run("--cold", "--nproc-per-node", "2", *script)
    cluster.until_all_step(2)
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()
    [incident] = cluster.incidents()
    story: Body = until(
        lambda: cluster.api.get(f"jobs/{cluster.job}/incidents/{incident['incident']}"),
        "what was collected is on record",
        holds=lambda story: {"page", "process"} <= {one["kind"] for one in story["evidence"]},
    )
    return story


def test_a_restart_leaves_evidence_of_the_ranks_and_what_came_of_the_decision(
    patient_up: Up, new_cluster: NewCluster, job: str
) -> None:
    """Evidence, alternatives and outcome are on record (A4.6)."""
    cluster = new_cluster(patient_up, job)
    story = recovered(cluster)
    [action] = story["actions"]
    assert (action["action"], action["outcome"]) == ("restart", "done")
    assert action["outcome_reason"] == "all ranks of round 2 run"
    assert action["considered"][0]["action"] == "stop"
    evidence = {one["kind"]: one for one in story["evidence"]}
    assert "rank 0: script" in evidence["page"]["summary"]
    assert "rank 1: script" in evidence["page"]["summary"]  # a page outlives its rank
    assert "rank 0: " in evidence["process"]["summary"]
    assert "rank 1" not in evidence["process"]["summary"]
    assert all(evidence[kind]["blob"]["size_bytes"] for kind in ("page", "process"))
    stopped = cluster.until_fact("ranks_stopped", lambda body: body["round"] == 1)
    assert stopped["evidence_s"] > 0


def test_a_crash_loop_says_how_long_it_waits_and_why(cluster: Cluster) -> None:
    """One line has the delay and the failure that causes it (A4.3)."""
    script = cluster.folder / "fails.py"
    script.write_text("raise OSError('the file system does not answer')\n")  # may pass
    agent = cluster.run("--cold", "--no-progress-limit", "none", str(script))
    cluster.until_fact("round_formed", lambda body: body["round"] == 3)
    [said] = until(
        lambda: [line for line in agent.said.splitlines() if "waits 5 s" in line],
        "the agent reports it",
    )
    why = "2 rounds in a row failed within 60 s without known progress; the last one: rank 0"
    assert said.startswith(f"everstep: job {cluster.job} waits 5 s before round 3: {why}")
