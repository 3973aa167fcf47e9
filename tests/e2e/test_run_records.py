"""What is on record about a broken round: what was decided, and what its ranks were doing."""

from tests.e2e.cluster import Body, Cluster


def recovered(cluster: Cluster) -> Body:
    """The story of a rank that was killed, once its job has ended well."""
    cluster.steady("--nproc-per-node", "2")
    cluster.until_stepping(1)
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()
    [incident] = cluster.incidents()
    story: Body = cluster.api.get(f"jobs/{cluster.job}/incidents/{incident['incident']}")
    return story


def test_a_restart_leaves_evidence_of_the_ranks_and_what_came_of_the_decision(
    cluster: Cluster,
) -> None:
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
    [stopped] = [one for one in cluster.facts("ranks_stopped") if one["round"] == 1]
    assert 0 < stopped["evidence_s"] <= 0.3


def test_a_crash_loop_says_how_long_it_waits_and_why(cluster: Cluster) -> None:
    script = cluster.folder / "fails.py"
    script.write_text("import nothing_of_the_kind\n")
    agent = cluster.run("--cold", "--no-progress-limit", "none", str(script))
    cluster.until_fact("round_formed", lambda body: body["round"] == 3)
    [said] = [line for line in agent.said.splitlines() if "waits 5 s" in line]
    why = "2 rounds in a row failed within 60 s and without progress; the last one: rank 0"
    assert said.startswith(f"everstep: job {cluster.job} waits 5 s before round 3: {why}")
