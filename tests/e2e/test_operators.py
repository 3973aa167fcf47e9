"""People stop, restart and drain what really runs, with the commands that they have."""

from pathlib import Path

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Pieces
from tests.e2e.operators import ask, command, operator
from tests.e2e.processes import SCRIPTS, Process, environment, python
from tests.waiting import until

FREE = "another round follows, and does not count against the restart budget"
STOPPED = "the job is stopped, and its agents exit with 93"


def test_a_run_with_its_own_bus_is_stopped_and_ends_with_93(tmp_path: Path, job: str) -> None:
    environ = environment(tmp_path, job, EVERSTEP_STATE_DIR=str(tmp_path / "state"))
    words = ("run", "--job", job, "--cold", "--nproc-per-node", "2")
    script = (str(SCRIPTS / "steady.py"), str(tmp_path))
    run = Process(
        python("-m", "everstep_services.cli", *words, *script), environ, tmp_path / "run.log"
    )
    try:
        until((tmp_path / "step").exists, "it makes steps")
        until(lambda: f"job {job}: http://" in run.said, "it has said where it can be asked")
        until(lambda: job in command(environ, "jobs").stdout, "history has it on record")
        mistyped = command(environ, "stop", f"{job}x")
        assert mistyped.returncode == Exit.NOT_FOUND
        said = f"everstep: there is no job {job}x; did you mean {job}?\n"
        assert mistyped.stderr == said
        stopped = command(environ, "stop", job, "--no-save", "--reason", "diverged")
        assert (stopped.returncode, stopped.stderr) == (0, "")
        assert stopped.stdout == f"{job}: round 1 ends; {STOPPED}\n"
        assert run.wait() == 93
    finally:
        run.kill()


def test_a_restart_is_another_round_and_no_restart_of_the_budget(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2", "--max-restarts", "0")
    cluster.until_stepping(1)
    done = ask(cluster, "restart", cluster.job, "--reason", "a new data mix")
    assert done["text"] == f"round 1 ends; {FREE}"
    cluster.until_stepping(2)
    assert cluster.incidents() == []
    assert cluster.facts("round_formed")[1].get("restarts", 0) == 0
    act = cluster.until_fact("operator_acted")
    assert (act["action"], act["reason"], act["origin"]) == (
        "restart_job",
        "a new data mix",
        "rest",
    )
    assert act["by"] == done["by"]
    ended = cluster.until_fact("round_ended")
    assert (ended["cause"], "a new data mix" in ended["reason"]) == ("operator", True)

    ask(cluster, "stop", cluster.job, "--no-save")
    assert agent.wait() == 93
    assert cluster.until_fact("job_ended")["state"] == "stopped"


def test_a_drained_node_goes_with_0_and_its_slot_to_the_spare(cluster: Cluster) -> None:
    options = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")
    # Names of their own: a node that takes part in several jobs cannot be drained without a job.
    first, second, spare = (f"{cluster.job}-{number}" for number in (1, 2, 3))
    for node in (first, second):
        cluster.steady(*options, node=node)
    cluster.until_stepping(1)
    cluster.steady(*options, node=spare)
    cluster.until_fact("node_joined", lambda body: body["node"] == spare)
    leaving = cluster.members(1)[1]
    done = ask(cluster, "drain", leaving)
    assert (done["job"], done["node"]) == (cluster.job, leaving)
    left = f"{leaving} leaves, and its agent exits with 0; the others continue without it"
    assert done["text"] == f"round 1 ends; {left}"
    cluster.until_stepping(2)
    assert cluster.members(2) == {**cluster.members(1), 1: spare}
    assert next(one for one in cluster.agents if one.node == leaving).wait() == 0
    until_left(cluster, leaving, 0)
    cluster.finish()
    cluster.until_done()


def until_left(cluster: Cluster, node: str, exit_code: int) -> None:
    """A drained node is on record as one that left."""
    left = cluster.until_fact("node_left", lambda body: body["node"] == node)
    assert left["exit_code"] == exit_code
    until(
        lambda: cluster.api.get(f"nodes/{node}")["state"] == "left",
        f"node {node} is shown as one that left",
    )


def test_a_drained_node_without_a_spare_goes_with_90_and_has_left(cluster: Cluster) -> None:
    """Its agent exits with 90 (A12.3), and nobody takes the node for one that takes part."""
    nodes = [f"{cluster.job}-{number}" for number in (1, 2)]
    for node in nodes:
        cluster.steady("--nnodes", "2", "--nproc-per-node", "1", node=node)
    cluster.until_stepping(1)
    leaving, staying = cluster.members(1)[1], cluster.members(1)[0]
    ask(cluster, "drain", leaving)
    agents = {agent.node: agent for agent in cluster.agents}
    assert agents[leaving].wait() == 90
    until_left(cluster, leaving, 90)
    words = ("nodes", cluster.job, "--state", "left", "--api", cluster.plane.api)
    listed = command(operator(cluster.plane, cluster.folder), *words)
    assert (leaving in listed.stdout, staying in listed.stdout) == (True, False), listed.stderr
    ask(cluster, "stop", cluster.job, "--no-save")
    assert agents[staying].wait() == 93


def test_while_history_is_away_a_job_is_stopped_over_the_bus(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    cluster = new_cluster(shared_pieces, job)
    agent = cluster.steady("--nproc-per-node", "2")
    cluster.until_stepping(1)
    shared_pieces.kill("history")
    environ = {**operator(cluster.plane, cluster.folder), **shared_pieces.login(job)}
    words = ("stop", job, "--no-save", "--reason", "quota")
    stopped = command(environ, *words, "--api", shared_pieces.api)
    assert (stopped.returncode, stopped.stdout) == (0, f"{job}: round 1 ends; {STOPPED}\n")
    assert "; asking over the bus\n" in stopped.stderr
    assert agent.wait() == 93
    shared_pieces.revive("history")
    act = cluster.until_fact("operator_acted")
    assert (act["origin"], act["reason"], "@" in act["by"]) == ("cli", "quota", True)
