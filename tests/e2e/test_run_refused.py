"""What keeps an agent from taking part: one line that says what to do, and soon."""

import socket
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.control_planes import Up, free_port
from tests.e2e.processes import SCRIPTS

WITHIN_S = 30.0


def one_line(agent: Agent) -> str:
    """The one line that it said on its way out."""
    lines = [line for line in agent.said.splitlines() if "note:" not in line]
    assert len(lines) == 1, agent.said
    return lines[0]


def on_bus(cluster: Cluster, url: str, password: Path | None = None) -> Agent:
    given = ("--bus-user", "service", "--bus-password-file", str(password)) if password else ()
    script = (str(SCRIPTS / "steady.py"), str(cluster.folder))
    return cluster.run("--cold", "--bus-url", url, *given, *script)


@pytest.mark.parametrize(
    ("host", "says"), [("127.0.0.1", "refused"), ("no-such-host.invalid", "no-such-host.invalid")]
)
def test_a_bus_that_is_not_there(cluster: Cluster, host: str, says: str) -> None:
    began = time.monotonic()
    url = f"nats://{host}:{free_port()}"
    agent = on_bus(cluster, url)
    assert agent.wait() == 94
    assert time.monotonic() - began < WITHIN_S
    assert url.removeprefix("nats://") in one_line(agent)
    assert says in one_line(agent)


def test_something_else_answers_at_the_address_of_the_bus(cluster: Cluster, shared_up: Up) -> None:
    began = time.monotonic()
    agent = on_bus(cluster, shared_up.api.replace("http://", "nats://"))
    assert agent.wait() == 94
    assert time.monotonic() - began < WITHIN_S
    assert one_line(agent)


def test_nobody_answers_at_the_address_of_the_bus(cluster: Cluster) -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = on_bus(cluster, f"nats://127.0.0.1:{server.getsockname()[1]}")
        assert agent.wait() == 94
    assert time.monotonic() - began < WITHIN_S
    assert one_line(agent)


def test_wrong_credentials(cluster: Cluster, shared_up: Up) -> None:
    password = cluster.folder / "password"
    password.write_text("not this one\n")
    password.chmod(0o600)
    agent = on_bus(cluster, shared_up.running.bus, password)
    assert agent.wait(WITHIN_S) == 2
    assert "service" in one_line(agent)


def test_a_second_node_of_the_same_name(cluster: Cluster) -> None:
    cluster.steady("--nnodes", "2")
    cluster.until_fact("node_joined")
    second = cluster.steady("--nnodes", "2")
    assert second.wait(WITHIN_S) == 2
    assert "another agent runs as node-1" in one_line(second)
    assert "--node-id" in one_line(second)
    cluster.steady("--nnodes", "2", node="node-2")
    cluster.until_stepping(1)
    cluster.finish()
    assert [agent.wait() for agent in cluster.agents] == [0, 2, 0]


def test_a_node_that_runs_something_else(cluster: Cluster) -> None:
    cluster.steady("--nnodes", "2")
    cluster.until_fact("node_joined")
    other = cluster.steady("--nnodes", "3", "--nproc-per-node", "2", node="node-2")
    assert other.wait(WITHIN_S) == 2
    assert "ranks_per_node is 2 here and 1 in the job" in one_line(other)
    cluster.steady("--nnodes", "2", node="node-3")
    cluster.until_stepping(1)
    cluster.finish()
    assert [agent.wait() for agent in cluster.agents] == [0, 2, 0]


def test_a_job_that_is_done_is_not_run_again(cluster: Cluster) -> None:
    cluster.finish()
    assert cluster.steady().wait() == 0
    again = cluster.steady()
    assert again.wait(WITHIN_S) == 0
    assert "is over" in again.said
    assert [one["round"] for one in cluster.facts("round_formed")] == [1]
