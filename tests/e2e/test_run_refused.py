"""What keeps an agent from taking part: one line that says what to do, and soon (A2.7)."""

import socket
from pathlib import Path

import pytest

from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.keys import Key, KeyKind
from everstep.bus.auth.login import write_private
from everstep.bus.auth.roles import SERVICE, agents_name
from tests.e2e.cluster import Agent, Cluster
from tests.e2e.control_planes import Up
from tests.e2e.ports import free_port
from tests.e2e.processes import SCRIPTS
from tests.variants import variant

RESOLVED_WITHIN_S = 150.0


def one_line(agent: Agent) -> str:
    """The one line that it said on its way out."""
    lines = [line for line in agent.said.splitlines() if "note:" not in line]
    assert len(lines) == 1, agent.said
    return lines[0]


def on_bus(cluster: Cluster, url: str, login: Path | None = None, node: str = "node-1") -> Agent:
    given = ("--bus-credentials-file", str(login)) if login else ()
    script = (str(SCRIPTS / "steady.py"), str(cluster.folder))
    return cluster.run("--cold", "--bus-url", url, *given, *script, node=node)


def test_a_bus_that_is_not_there_or_is_something_else(cluster: Cluster, shared_up: Up) -> None:
    """Nobody listens, a web server answers, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [
            f"127.0.0.1:{free_port()}",
            shared_up.api.removeprefix("http://"),
            f"127.0.0.1:{silent.getsockname()[1]}",
        ]
        agents = [
            on_bus(cluster, f"nats://{place}", node=f"node-{number}")
            for number, place in enumerate(places)
        ]
        assert [agent.wait() for agent in agents] == [94] * len(agents)
    for agent, place in zip(agents, places, strict=True):
        assert place in one_line(agent)


@pytest.mark.variant
def test_a_bus_whose_name_nobody_knows(cluster: Cluster) -> None:
    """How soon it is known that there is no such name is for the resolver to say."""
    agent = on_bus(cluster, "nats://no-such-host.invalid:4222")
    assert agent.wait(RESOLVED_WITHIN_S) == 94
    assert "no-such-host.invalid:4222" in one_line(agent)


def test_wrong_credentials(cluster: Cluster, shared_up: Up) -> None:
    login = cluster.folder / "of-another-operator.creds"
    name = agents_name(cluster.job)
    write_private(login, Operator(Key.new(KeyKind.OPERATOR)).login(name).text())
    agent = on_bus(cluster, shared_up.running.bus, login)
    assert agent.wait() == 2
    assert str(login) in one_line(agent)


@pytest.mark.parametrize(
    ("name", "said"),
    [(SERVICE, "one of the control plane"), (agents_name("other"), "is of another job")],
)
def test_a_login_that_is_not_of_the_job(
    cluster: Cluster, shared_up: Up, name: str, said: str
) -> None:
    """A8: the scripts of a job can use what their agent has, so it has no more than it needs."""
    login = cluster.folder / "of-somebody-else.creds"
    operator = Operator.opened(shared_up.state.path / "nats")
    write_private(login, operator.login(name).text())
    agent = on_bus(cluster, shared_up.running.bus, login)
    assert agent.wait() == 2
    line = one_line(agent)
    assert said in line
    assert str(login) in line
    assert f"everstep bus login {cluster.job}" in line


def test_files_for_tls_between_agents_that_are_not_there(cluster: Cluster) -> None:
    names = ("CA_FILE", "CERT_FILE", "KEY_FILE")
    missing = cluster.folder / "missing.pem"
    files = {f"EVERSTEP_AGENT__CHECKPOINTS__{name}": str(missing) for name in names}
    agent = cluster.steady(**files)
    assert agent.wait() == 2
    assert f"agent.checkpoints.ca_file {missing}: No such file or directory" in one_line(agent)


def test_an_interface_that_is_not_there(cluster: Cluster) -> None:
    agent = cluster.steady(GLOO_SOCKET_IFNAME="lo,eth-none")
    assert agent.wait() == 2
    line = one_line(agent)
    assert "GLOO_SOCKET_IFNAME=lo,eth-none: this host has no interface eth-none" in line
    assert "lo (127.0.0.1" in line, "which ones there are"
    assert cluster.left() == []


@pytest.mark.parametrize(
    "folder", [pytest.param("another-host", id="another-host"), variant("node-1", id="same-host")]
)
def test_a_second_node_of_the_same_name(cluster: Cluster, folder: str) -> None:
    cluster.steady("--nnodes", "2")
    cluster.until_fact("node_joined")
    second = cluster.steady("--nnodes", "2", EVERSTEP_STATE_DIR=str(cluster.folder / folder))
    assert second.wait() == 2
    assert "another agent runs as node-1" in second.said
    assert "--node-id" in second.said
    cluster.steady("--nnodes", "2", node="node-2")
    cluster.until_stepping(1)
    cluster.finish()
    assert [agent.wait() for agent in cluster.agents] == [0, 2, 0]


def test_a_node_that_runs_something_else(cluster: Cluster) -> None:
    cluster.steady("--nnodes", "2")
    cluster.until_fact("node_joined")
    other = cluster.steady("--nnodes", "3", "--nproc-per-node", "2", node="node-2")
    assert other.wait() == 2
    assert "ranks_per_node is 2 here and 1 in the job" in other.said
    cluster.steady("--nnodes", "2", node="node-3")
    cluster.until_stepping(1)
    cluster.finish()
    assert [agent.wait() for agent in cluster.agents] == [0, 2, 0]


def test_a_job_that_is_done_is_not_run_again(cluster: Cluster) -> None:
    cluster.finish()
    assert cluster.steady().wait() == 0
    cluster.until_fact("job_ended")
    again = cluster.steady()
    assert again.wait() == 0
    assert "is over" in again.said
    assert [one["round"] for one in cluster.facts("round_formed")] == [1]
