"""Real trainings with a fault: each gets the right verdict, and no restart waits for it."""

import signal

from everstep_services.agent.settings import KINDS
from everstep_services.cli.pages.incidents.story import story
from tests.e2e.cluster import Body, Cluster
from tests.e2e.conftest import START_WITHIN_S
from tests.e2e.operators import ask
from tests.e2e.processes import SCRIPTS

LIMITS = ("--limit", "elsewhere=5", "--limit", "outside=60", "--limit", "backward=60")
"""Short where it hangs; elsewhere ranks that get no turn for a while have not stalled."""
TROUBLED = str(SCRIPTS / "troubled.py")


def verdict_of(cluster: Cluster) -> Body:
    """The first verdict about the incident of round 1 for which there was evidence.

    Attribution waits for some seconds: an agent that stands for longer has sent none by then.
    """
    opened = cluster.until_fact("incident_opened", lambda body: body["round"] == 1, START_WITHIN_S)

    def is_it(body: Body) -> bool:
        return body["incident"] == opened["incident"] and not body.get("is_inconclusive")

    return cluster.until_fact("verdict_reached", is_it)


def test_a_rank_that_raises_is_the_culprit_and_its_peers_are_not(cluster: Cluster) -> None:
    """A user's error (A7.1, A11.1)."""
    cluster.run("--nproc-per-node", "4", TROUBLED, "raises", "2")
    verdict = verdict_of(cluster)
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("user_code", [2])
    assert verdict.get("culprit_nodes", []) == []
    assert "ValueError: batch 4 has no labels" in verdict["reason"]
    cluster.until_stepping(2)


def test_a_rank_that_says_nothing_is_the_headline_although_a_peer_reported_first(
    cluster: Cluster,
) -> None:
    """The first sentence names the culprit; the victim stays who reported first (A7.1, A11.1).

    How many victims end before they are stopped depends on the load, so a person confirms whose
    fault it was: the verdict that holds may be attribution's or theirs.
    """
    agent = cluster.run("--nproc-per-node", "3", TROUBLED, "silent", "2")
    incident = verdict_of(cluster)["incident"]
    note = ("--cause", "user_code", "--rank", "2", "--note", "it closed its connections")
    ask(cluster, "incident", "correct", incident, *note)
    cluster.until_fact("verdict_reached", lambda body: bool(body.get("is_corrected")))
    cluster.until_stepping(2)
    path = f"jobs/{cluster.job}"
    told = cluster.api.get(f"{path}/incidents/{incident}")
    first = told["first_report"]
    assert told["rank"] in {0, 1}, told
    assert first.startswith(f"rank {told['rank']}, perhaps because of another rank, exited with 1")
    assert told["headline"].startswith("rank 2: "), told
    assert told["headline"] in {one["headline"] for one in cluster.incidents()}
    ended = cluster.api.get(f"{path}/rounds/1")["end_headline"]
    assert ended == f"{told['headline']}; first reported: {first}"
    lines = list(story(told))
    assert lines[1].startswith("  rank 2: ")
    assert lines[2].startswith(f"  first reported: rank {told['rank']}, perhaps")
    assert lines[lines.index("what happened") + 1].startswith("  rank 2, ")
    assert f"round 1 is over: {first}" in agent.log.read_text()


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


FROZEN = """
import os, signal, sys, time
from pathlib import Path
import trainer_sdk

run, folder, rank = trainer_sdk.session(), Path(sys.argv[1]), os.environ["RANK"]
is_first = os.environ["EVERSTEP_ROUND"] == "1"
step = 0
while not (folder / "end").exists():
    step += 1
    with run.section("data"):
        time.sleep(0.02)
        if is_first and rank == "1" and step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
    run.step()
    if is_first and rank == "0" and (folder / "give-up").exists():
        raise RuntimeError("Connection closed by peer [10.0.0.3]:4711")
"""


def test_a_frozen_rank_is_the_culprit_though_others_made_more_steps(cluster: Cluster) -> None:
    """Its stall only warned, and is all the evidence: no other is collected (A7.1)."""
    script = cluster.folder / "frozen.py"
    script.write_text(FROZEN)
    options = ("--nproc-per-node", "2", "--no-restart-on-stall", "--limit", "data=2")
    others = ("--limit", "outside=60", "--limit", "first-step=60")
    environ = {"EVERSTEP_AGENT__EVIDENCE_WITHOUT": ",".join(KINDS)}
    agent = cluster.run(*options, *others, str(script), str(cluster.folder), **environ)
    stall = cluster.until_fact("rank_stalled", lambda body: body["rank"] == 1)
    assert (stall["process_state"], stall["is_fatal"]) == ("T", False)
    (cluster.folder / "give-up").touch()
    opened = cluster.until_fact("incident_opened")
    assert (opened["trigger"], opened["rank"]) == ("rank_stalled", 1)
    verdict = cluster.until_fact("verdict_reached", lambda body: not body.get("revision"))
    assert verdict.get("culprit_ranks") == [1], verdict
    assert (verdict["cause"], verdict["kind"]) == ("host", "stopped_process")
    (cluster.folder / "end").touch()
    assert agent.wait() == 0
