"""Several jobs on one host, and jobs that bring their own control plane."""

import pytest

from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import SCRIPTS, Process, environment, python
from tests.waiting import until


def test_eight_jobs_at_once_do_not_touch_each_other(
    shared_up: Up, new_cluster: NewCluster, job: str
) -> None:
    """A rank of one job is killed; the seven others have no incident (A2.8)."""
    clusters = [new_cluster(shared_up, f"{job}-{number}") for number in range(8)]
    for cluster in clusters:
        cluster.steady("--nproc-per-node", "2")
    for cluster in clusters:
        cluster.until_stepping(1)
    broken, *others = clusters
    broken.kill_rank(1, 1)
    broken.until_stepping(2)
    for cluster in clusters:
        cluster.finish()
    for cluster in clusters:
        cluster.until_done()
    assert len(broken.incidents()) == 1
    assert [cluster.incidents() for cluster in others] == [[]] * 7
    ports = {cluster.facts("round_started")[0]["master_port"] for cluster in clusters}
    assert len(ports) == 8


@pytest.mark.parametrize("jobs", [2, pytest.param(8, marks=pytest.mark.chaos)])
def test_jobs_that_bring_their_own_bus_share_a_state_directory(
    new_cluster: NewCluster, shared_up: Up, job: str, jobs: int
) -> None:
    """Eight jobs, each with its bus, all end with 0 (A2.8)."""
    clusters = [new_cluster(shared_up, f"{job}-{number}") for number in range(jobs)]
    home = clusters[0].folder
    processes = []
    for cluster in clusters:
        environ = environment(home, cluster.tag, EVERSTEP_STATE_DIR=str(home / "state"))
        command = ("run", "--job", cluster.job, "--cold", "--nproc-per-node", "2")
        script = (str(SCRIPTS / "steady.py"), str(cluster.folder))
        log = cluster.folder / "run.log"
        everything = python("-m", "everstep_services.cli", *command, *script)
        processes.append(Process(everything, environ, log))
    try:
        for cluster in clusters:
            until((cluster.folder / "step").exists, "it makes steps")
            cluster.finish()
        assert [process.wait() for process in processes] == [0] * jobs
    finally:
        for process in processes:
            process.kill()
