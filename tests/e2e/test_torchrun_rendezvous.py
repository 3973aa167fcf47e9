"""`torchrun --rdzv-backend=everstep`: plain torchrun, and the rounds are Everstep's."""

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import ROOT, SCRIPTS, Process, environment

WITHIN_S = 240.0
LIMIT_S = 15.0

pytestmark = [
    pytest.mark.variant,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "everstep" not in entry_points(group="torchrun.handlers").names,
        reason="the entry point comes with the next installation: make setup",
    ),
]


@pytest.fixture
def nodes(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    """Two nodes of one job, each a torchrun with a single rank."""
    started: list[Process] = []
    fault = getattr(request, "param", "dies")
    try:
        started.extend(torchrun(cluster, node, fault) for node in ("n1", "n2"))
        yield started
    finally:
        for process in started:
            process.kill()


def torchrun(cluster: Cluster, node: str, fault: str) -> Process:
    options = ["--rdzv-backend=everstep", f"--rdzv-id={cluster.job}", "--nnodes=2"]
    conf = f"--rdzv-conf=node_id={node},join_timeout={WITHIN_S:g}"
    script = [str(SCRIPTS / "launched_by_torchrun.py"), str(cluster.folder), fault]
    command = [sys.executable, "-m", "torch.distributed.run", *options, conf]
    own = {**cluster.plane.login(cluster.job), "PYTHONPATH": str(ROOT)}
    own["EVERSTEP_AGENT__LIMITS"] = f"forward={LIMIT_S:g}"
    return Process(
        [*command, "--nproc-per-node=1", "--max-restarts=2", *script],
        environment(cluster.folder, cluster.tag, **own),
        cluster.folder / f"{node}.log",
        cluster.folder,
    )


def test_the_death_of_a_rank_starts_a_new_round_on_all_nodes(
    cluster: Cluster, nodes: list[Process]
) -> None:
    """One node's rank dies: both nodes restart theirs, at a new store, and the job ends."""
    assert [node.wait(WITHIN_S) for node in nodes] == [0, 0]
    stores = [places(cluster.folder, number) for number in (1, 2)]
    assert [len(store) for store in stores] == [1, 1]
    assert stores[0] != stores[1]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["rounds"]) == ("done", 2)
    (incident,) = cluster.incidents()
    assert incident["trigger"] == "rank_exited"
    decided = cluster.until_fact("action_decided", lambda body: body["action"] == "restart")
    limit = "torchrun counts restarts itself (at most 2 on each node)"
    assert decided["reason"].endswith(limit)


@pytest.mark.parametrize("nodes", ["hangs"], indirect=True)
def test_a_rank_that_hangs_is_found_and_starts_a_new_round(
    cluster: Cluster, nodes: list[Process]
) -> None:
    """A rank makes no progress past the limit of its section: both nodes restart their ranks."""
    assert [node.wait(WITHIN_S) for node in nodes] == [0, 0]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["rounds"]) == ("done", 2)
    (incident,) = cluster.incidents()
    assert incident["trigger"] == "rank_stalled"
    assert "in section forward; the limit is 15 s" in incident["reason"]


def places(folder: Path, number: int) -> set[str]:
    """Where the ranks of a round have met."""
    return {(folder / f"rank-{rank}-{number}").read_text() for rank in range(2)}
