"""Ranks that survive keep their process and their state: no step is lost, and the losses stay."""

import socket
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS, Process, environment

SCRIPT = str(SCRIPTS / "surviving.py")
SHARDED = str(SCRIPTS / "surviving_sharded.py")
RANKS = 4
WITHIN_S = 180.0
FAILURES = {1: ("kill", 2, 8), 2: ("raise", 0, 14), 3: ("hang", 3, 20), 4: ("late", 1, 26)}
"""By round: what ends a rank, which, and in which step. Rank 0 has the store of its round."""


def test_survivors_go_on_with_their_state_after_each_kind_of_failure(cluster: Cluster) -> None:
    undisturbed = cluster.folder / "undisturbed"
    undisturbed.mkdir()
    train_alone(undisturbed, SCRIPT, str(undisturbed))
    failures = [f"{number}:{kind}:{rank}:{step}" for number, (kind, rank, step) in FAILURES.items()]
    # Only where a rank hangs; elsewhere ranks that get no turn for a while have not stalled.
    limits = ("--limit", "data=5", "--limit", "outside=60", "--max-restarts", "none")
    options = ("--nproc-per-node", str(RANKS), *limits)
    agent = cluster.run(*options, SCRIPT, str(cluster.folder), *failures)
    assert agent.wait(WITHIN_S) == 0, agent.said
    for rank in range(RANKS):
        losses, processes = made(cluster.folder, rank)
        expected, _ = made(undisturbed, rank)
        assert losses == {step: expected[step] for step in losses}
        model = f"model-{rank}"
        assert (cluster.folder / model).read_bytes() == (undisturbed / model).read_bytes()
        failed = sum(rank == each for _, each, _ in FAILURES.values())
        assert len(processes) == 1 + failed
    incidents = cluster.closed(len(FAILURES))
    assert [incident["rank"] for incident in incidents] == [
        rank for _, rank, _ in FAILURES.values()
    ]
    assert {incident["outcome"] for incident in incidents} == {"recovered"}
    assert [incident["lost_steps"] for incident in incidents] == [0] * len(FAILURES)
    assert all("kept their state, 0 steps lost" in incident["story"] for incident in incidents)
    for number, (_, lost, _) in FAILURES.items():
        started = {
            body["rank"]: body["start"]
            for body in cluster.facts("rank_started")
            if body["round"] == number + 1
        }
        assert {rank for rank, start in started.items() if start != "kept"} == {lost}


@pytest.mark.parametrize("kind", ["hsdp", "fsdp"])
def test_sharded_states_go_on_from_replicas_or_from_images(cluster: Cluster, kind: str) -> None:
    undisturbed = cluster.folder / "undisturbed"
    undisturbed.mkdir()
    train_alone(undisturbed, SHARDED, kind, str(undisturbed))
    lost = {1: (1, 8), 2: (2, 17)}
    failures = [f"{number}:{rank}:{step}" for number, (rank, step) in lost.items()]
    options = ("--nproc-per-node", str(RANKS), "--max-restarts", "none")
    agent = cluster.run(*options, SHARDED, kind, str(cluster.folder), *failures)
    assert agent.wait(WITHIN_S) == 0, agent.said
    for rank in range(RANKS):
        losses, processes = made(cluster.folder, rank)
        assert losses == made(undisturbed, rank)[0]
        model = f"model-{rank}"
        assert (cluster.folder / model).read_bytes() == (undisturbed / model).read_bytes()
        assert len(processes) == 1 + sum(rank == each for each, _ in lost.values())
    incidents = cluster.closed(len(lost))
    assert [incident["rank"] for incident in incidents] == [rank for rank, _ in lost.values()]
    if kind == "hsdp":
        assert [incident["lost_steps"] for incident in incidents] == [0] * len(lost)


def train_alone(folder: Path, *script: str) -> None:
    """The same training without an agent, in which nothing fails."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    own = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        Process(
            [sys.executable, *script],
            environment(folder, "alone", **own, RANK=rank, LOCAL_RANK=rank, EVERSTEP_ATTACH="off"),
            folder / f"rank-{rank}.log",
        )
        for rank in map(str, range(RANKS))
    ]
    try:
        assert [rank.wait(WITHIN_S) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    assert "does not survive the failure of a rank: only `everstep run`" in ranks[0].said


def made(folder: Path, rank: int) -> tuple[dict[int, str], set[str]]:
    """The loss of each step, which is the same each time it was made; and the processes."""
    losses: dict[int, set[str]] = defaultdict(set)
    processes = set()
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss, process = line.split()
        losses[int(step)].add(loss)
        processes.add(process)
    return {step: value for step, (value,) in losses.items()}, processes
