"""Health daemons of nodes, each a process that answers by gRPC on a unix socket.

Acceptance: A10.4.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.nvrx import wheels
from tests.e2e.processes import Process, environment, python
from tests.fakes.health_daemon import HEALTHY
from tests.waiting import until

ARGUMENTS = ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"]
FAILING = '{"fail_count": 1, "failed": "gpu 3 fell off the bus"}'

SILENT = "probe daemon has no result, which counts as neither failed nor ok"


class Daemon(Process):
    """The daemon of one node; its answer changes while it runs."""

    def __init__(self, folder: Path, log: Path, tag: str, answer: str, wheel: str = "") -> None:
        self.socket = folder / f"{log.stem}.sock"
        self.answers(answer)
        command = python("-m", "tests.fakes.health_daemon", str(self.socket), wheel)
        super().__init__(command, environment(log.parent, tag), log)
        until(lambda: self.socket.exists() or self.poll(), "the daemon listens")
        assert self.poll() is None, self.said

    def answers(self, output: str) -> None:
        fresh = self.socket.with_suffix(".new")
        fresh.write_text(output)
        fresh.replace(self.socket.with_suffix(".answer"))

    @property
    def asked(self) -> list[list[str]]:
        asked = self.socket.with_suffix(".asked")
        return [json.loads(line) for line in asked.read_text().splitlines()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts the daemon of a node; a path of a unix socket has at most 107 bytes."""
    daemons: list[Daemon] = []
    with tempfile.TemporaryDirectory(prefix="e-") as folder:

        def start(node: str, answer: str, wheel: str = "") -> Daemon:
            log, tag = tmp_path / f"{node}-daemon.log", f"daemons-of-{tmp_path.name}"
            daemons.append(Daemon(Path(folder), log, tag, answer, wheel))
            return daemons[-1]

        yield start
        for daemon in daemons:
            daemon.kill()


def probed_every_second(folder: Path) -> str:
    """Settings with the check `daemon` as the only probe."""
    others = ("gpu", "host", "kernel", "nic", "nvlink")
    config = folder / "everstep.toml"
    config.write_text(
        "[checks]\njoin_waits_s = 120\nprobe_cpu_percent = 50\n"
        "[checks.probes.daemon]\nevery_s = 1\nwithin_s = 30\nfailures = 2\npolicy = 'end_round'\n"
        + "".join(f"[checks.probes.{name}]\nevery_s = 0\n" for name in others)
    )
    return str(config)


@pytest.mark.variant
def test_a_node_whose_daemon_reports_a_failure_is_left_out_until_it_reports_none(
    cluster: Cluster, start: Callable[..., Daemon]
) -> None:
    """Before the first round, and while ranks train; a silent daemon accuses no node (A10.4)."""
    config = probed_every_second(cluster.folder)
    nodes = ("node-1", "node-2", "node-3")
    daemons = {node: start(node, FAILING if node == "node-1" else HEALTHY) for node in nodes}
    agents = {
        node: cluster.steady(
            *("--nnodes", "2", "--spares", "1", "--stop-grace", "1"),
            *("--ft-node-health-check-endpoint", f"unix://{daemon.socket}"),
            node=node,
            EVERSTEP_CONFIG=config,
        )
        for node, daemon in daemons.items()
    }
    cluster.until_stepping(1)
    assert set(cluster.members(1).values()) == {"node-2", "node-3"}
    refused = cluster.until_fact("node_refused")
    assert (refused["node"], refused["cause"]) == ("node-1", "unhealthy")
    assert "gpu 3 fell off the bus" in refused["reason"]
    assert daemons["node-1"].asked[0] == ARGUMENTS

    daemons["node-1"].answers(HEALTHY)
    cluster.until_fact("node_joined", lambda body: body["node"] == "node-1")
    daemons["node-3"].answers(FAILING)
    cluster.until_stepping(2)
    assert set(cluster.members(2).values()) == {"node-1", "node-2"}
    (incident,) = cluster.incidents()
    assert (incident["trigger"], incident["node"]) == ("check_failed", "node-3")
    assert "gpu 3 fell off the bus" in incident["reason"]

    daemons["node-2"].kill()
    console = agents["node-2"].log
    until(console.read_text, "its silence is reported", holds=lambda text: SILENT in text)
    cluster.finish()
    cluster.until_done()
    assert len(cluster.incidents()) == 1


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [(HEALTHY, 0, "ok"), (FAILING, 2, "1 of its checks fail: "), ("{}", 3, "has no fail_count")],
)
def test_the_check_understands_the_service_that_nvrx_ships(
    tmp_path: Path, start: Callable[..., Daemon], answer: str, code: int, line: str
) -> None:
    """Both sides of the conversation are of their own makers: our client, NVRx's classes."""
    daemon = start("node", answer, str(wheels.nvrx(tmp_path)))
    check = Process(
        python("-m", "everstep_services.cli", "check", "daemon"),
        environment(tmp_path, tmp_path.name, EVERSTEP_CHECKS__DAEMON=str(daemon.socket)),
        tmp_path / "check.log",
    )
    assert check.wait() == code, check.said
    assert line in check.said
    assert daemon.asked == [ARGUMENTS]
