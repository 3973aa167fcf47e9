"""Logs in one place: a real training on two nodes, and `everstep logs` on a third machine."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Pieces
from tests.e2e.processes import SCRIPTS, environment, python
from tests.waiting import WITHIN_S, until

STORING = ("--store-logs", "--nnodes", "2")


def start(cluster: Cluster, node: str, *words: str) -> None:
    script = (str(SCRIPTS / "talking_gloo.py"), str(cluster.folder), *words)
    cluster.run(*STORING, *script, node=node)


def elsewhere(cluster: Cluster, *words: str) -> str:
    """What a command prints on a machine that has no file of the job."""
    done = asked_elsewhere(cluster, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked_elsewhere(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    folder = cluster.folder / "elsewhere"
    token = folder / "token"
    folder.mkdir(exist_ok=True)
    token.write_text(cluster.plane.token)
    environ = environment(
        folder, cluster.tag, EVERSTEP_STATE_DIR=str(folder),
        EVERSTEP_CLIENT__URL=cluster.plane.api, EVERSTEP_CLIENT__TOKEN_FILE=str(token),
    )  # fmt: skip
    command = python("-m", "everstep_services.cli", "logs", cluster.job, *words)
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


def check_unknown_rank(cluster: Cluster) -> None:
    refused = asked_elsewhere(cluster, "--round", "1", "--rank", "77")
    text = f"there is no rank 77 in round 1 of {cluster.job}: its ranks are 0 to 1"
    assert (refused.returncode, refused.stdout, refused.stderr) == (3, "", f"everstep: {text}\n")


def stored(cluster: Cluster, number: int, **filters: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor = None
    while True:
        asked = {**filters, "round": number, "cursor": cursor}
        page = cluster.api.get(f"jobs/{cluster.job}/logs", asked)
        items += page["items"]
        if page["is_end"]:
            return items
        cursor = page["next"]


def until_whole(cluster: Cluster, number: int) -> None:
    until(
        lambda: cluster.api.get(f"jobs/{cluster.job}/rounds/{number}/logs"),
        "all of the round is in the store",
        holds=lambda index: index["is_whole"] and len(index["nodes"]) == 2,
        despite=CliError,
    )


def written(cluster: Cluster, node: str, number: int, rank: int, stream: str) -> list[str]:
    """The lines in a file on a node."""
    folder = cluster.folder / node / "logs" / cluster.job / f"round-{number}" / f"rank-{rank}"
    return (folder / stream).read_bytes().decode(errors="replace").splitlines()


def test_whole_logs_of_all_nodes_on_any_machine(cluster: Cluster, tmp_path: Path) -> None:
    """A failed round and the one after it: all lines, by time, searched, and as NVRx's file."""
    for node in ("node-1", "node-2"):
        start(cluster, node, "fails")
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()
    for number in (1, 2):
        until_whole(cluster, number)
    nodes = {one["rank"]: one["node"] for one in stored(cluster, 1)}
    for number in (1, 2):
        for rank in (0, 1):
            for stream in ("stdout", "stderr"):
                lines = [one["text"] for one in stored(cluster, number, rank=rank, stream=stream)]
                assert lines == written(cluster, nodes[rank], number, rank, stream)
    texts = [one["text"] for one in stored(cluster, 2)]
    assert "last words of rank 1" in texts
    assert "broken � bytes" in texts
    printed = elsewhere(cluster, "--round", "1")
    assert f"{nodes[1]}:1| [rank1]: ValueError: the root cause" in printed
    assert f"{nodes[0]}:0| restart 0 rank 0 step 1" in printed
    found = elsewhere(cluster, "--round", "1", "--regex", "^restart 0 rank [01] step 1$")
    assert len(found.splitlines()) == 2
    [cause] = elsewhere(
        cluster, "--round", "1", "--contains", "ValueError: the root", "-o", "jsonl"
    ).splitlines()
    line = msgspec.json.decode(cause)
    assert (line["rank"], line["stream"], line["round"]) == (1, "stderr", 1)
    assert line["at"]
    check_unknown_rank(cluster)
    file = tmp_path / "round_cycle1.log"
    elsewhere(cluster, "--round", "1", "--cycle-file", str(file))
    cycle = file.read_text().splitlines()
    assert "1: [rank1]: ValueError: the root cause" in cycle
    assert len(cycle) == len(stored(cluster, 1))
    # On a node, its files come first; --store shows the other node's, too.
    assert len(elsewhere(cluster, "-n", "3").splitlines()) == 3


@pytest.mark.timeout(600)
def test_an_outage_and_the_death_of_an_agent_lose_no_line(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    """The bus is away: the agent catches up from the files. It is killed: the next one does."""
    cluster = new_cluster(shared_pieces, job)
    for node in ("node-1", "node-2"):
        start(cluster, node)
    until(lambda: stored(cluster, 1), "lines are stored", despite=CliError)
    shared_pieces.kill("nats")
    file = cluster.folder / "node-2" / "logs" / job / "round-1"
    before = sum(path.stat().st_size for path in file.glob("rank-*/stdout"))
    until(
        lambda: sum(path.stat().st_size for path in file.glob("rank-*/stdout")),
        "the ranks write on", holds=lambda size: size > before + 500,
    )  # fmt: skip
    shared_pieces.revive("nats")
    agent = next(agent for agent in cluster.agents if agent.node == "node-2")
    until(
        lambda: stored(cluster, 1, node="node-2", stream="stdout"), "lines of after the outage",
        holds=lambda lines: len(lines) > before / 30, despite=CliError,
    )  # fmt: skip
    agent.kill()
    start(cluster, "node-2")
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()
    for number in (1, 2):
        until_whole(cluster, number)
    for rank in (0, 1):
        lines = stored(cluster, 1, rank=rank, stream="stdout")
        node = lines[0]["node"]
        assert [one["text"] for one in lines] == written(cluster, node, 1, rank, "stdout")
        assert [one["number"] for one in lines] == list(range(len(lines)))
