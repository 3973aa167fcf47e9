"""Where no round follows, the ranks that are left save the state after the failure."""

from tests.e2e.cluster import Cluster
from tests.e2e.test_run_survive import RANKS, SCRIPT, WITHIN_S, made, train_alone


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
