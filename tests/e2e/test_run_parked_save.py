"""Where no round follows, the ranks that are left save the state after the failure."""

from functools import partial
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.e2e.test_run_survive import RANKS, SCRIPT, WITHIN_S, made, train_alone
from tests.e2e.test_run_survivors import LOST_AFTER, has
from tests.waiting import until


def test_the_next_launch_goes_on_where_a_job_without_restarts_has_failed(cluster: Cluster) -> None:
    undisturbed = cluster.folder / "undisturbed"
    undisturbed.mkdir()
    train_alone(undisturbed, SCRIPT, str(undisturbed))
    options = ("--nproc-per-node", str(RANKS), "--max-restarts", "0")
    script = (SCRIPT, str(cluster.folder), "saves", "1:kill:0:8")
    agent = cluster.run(*options, *script)
    assert agent.wait(WITHIN_S) == 1, agent.said
    assert "the ranks that are parked save their states" in agent.said
    again = cluster.run(*options, *script)
    assert again.wait(WITHIN_S) == 0, again.said
    for rank in range(RANKS):
        expected, _ = made(undisturbed, rank)
        losses, processes = made(cluster.folder, rank)
        made_in_all = (cluster.folder / f"losses-{rank}").read_text().splitlines()
        assert losses == expected
        assert len(made_in_all) == len(losses), "no step was made twice"
        assert len(processes) == 2


def test_ranks_that_wait_for_a_lost_node_have_saved_before_their_node_is_lost_too(
    tmp_path: Path, new_cluster: NewCluster, job: str
) -> None:
    with running_up(tmp_path / "up", **(PATIENT | LOST_AFTER)) as up:
        lose_both_nodes(new_cluster(up, job))


def lose_both_nodes(cluster: Cluster) -> None:
    options = ("--nnodes", "2", "--nproc-per-node", str(RANKS // 2))
    script = (SCRIPT, str(cluster.folder), "saves", "1:hang:3:8")
    first, second = (
        cluster.run(*options, "--infra-rank", str(place), *script, node=f"node-{place}")
        for place in (0, 1)
    )
    steps = partial(made_so_far, cluster.folder / "losses-0")
    until(steps, "rank 3 hangs in step 8", holds=has("\n7 "))
    second.kill_node()
    until(lambda: first.said, "they save", holds=has("parked save their states"))
    checkpoints = cluster.folder / "checkpoints"
    until(lambda: [*checkpoints.glob("*7")], "the checkpoint of step 7 is visible")
    first.kill_node()
    again = [
        cluster.run(*options, "--infra-rank", str(place), *script, node=f"node-{place}")
        for place in (0, 1)
    ]
    assert [agent.wait(WITHIN_S) for agent in again] == [0, 0]
    for rank in range(RANKS):
        losses, _ = made(cluster.folder, rank)
        made_in_all = (cluster.folder / f"losses-{rank}").read_text().splitlines()
        assert [*losses] == list(range(1, 31))
        assert len(made_in_all) == len(losses), "no step was made twice"


def made_so_far(path: Path) -> str:
    return path.read_text() if path.exists() else ""
