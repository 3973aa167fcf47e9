"""A training on a cluster, and what must be true of it after whatever was done to it."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from everstep_services.cli.errors import CliError
from tests.cluster.records import prove_recorded
from tests.cluster.servers import NAMES, Cluster
from tests.cluster.services import Services, services_of
from tests.cluster.wall_clock import WallClock
from tests.e2e.cluster import Cluster as Agents
from tests.waiting import until

log = logging.getLogger(__name__)
NODES = ("node-1", "node-2", "node-3")


class Pauses:
    """The longest time between two steps, as seen in the file of rank 0."""

    def __init__(self, steps: Path) -> None:
        self._steps = steps
        self._is_over = threading.Event()
        self.longest_s = 0.0

    def watch(self) -> None:
        seen, since = -1, time.monotonic()
        while not self._is_over.wait(0.005):
            made = self._steps.stat().st_mtime_ns
            if made != seen:
                seen, since = made, time.monotonic()
            self.longest_s = max(self.longest_s, time.monotonic() - since)

    @contextmanager
    def measured(self) -> Iterator["Pauses"]:
        thread = threading.Thread(target=self.watch)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()


def step_of(agents: Agents) -> int:
    saved = agents.folder / "step"
    return int(saved.read_text()) if saved.exists() else 0


def further(agents: Agents, steps: int) -> None:
    goal = step_of(agents) + steps
    until(lambda: step_of(agents), f"step {goal}", holds=lambda step: step >= goal)


class Training:
    """An agent at each server, with two ranks each, and two replicas of the services.

    node-3 and one replica of each begin at the server that leads the rounds.
    """

    def __init__(self, cluster: Cluster, services: Services, agents: Agents) -> None:
        self.cluster = cluster
        self.services = services
        self.agents = agents
        self.killed: list[int] = []

    def pauses(self) -> AbstractContextManager[Pauses]:
        return Pauses(self.agents.folder / "step").measured()

    def rank_of(self, node: str) -> tuple[int, int]:
        """The second rank of a node, and its process."""
        number = len(self.killed) + 1
        (slot,) = (slot for slot, name in self.agents.members(number).items() if name == node)
        return 2 * slot + 1, self.agents.pid_of(2 * slot + 1, number)

    def kill(self, victim: tuple[int, int]) -> None:
        rank, pid = victim
        os.kill(pid, signal.SIGKILL)
        self.killed.append(rank)

    def goes_on(self) -> None:
        """Return once the next round steps."""
        self.agents.until_stepping(len(self.killed) + 1)
        further(self.agents, 50)

    def heal(self) -> float:
        """Return the seconds until the cluster is whole, and all services are well."""
        began = time.monotonic()
        self.cluster.heal()
        log.info("the servers are whole after %.1f s", time.monotonic() - began)
        self.services.heal()
        return time.monotonic() - began

    def prove(self, what: str, pauses: Pauses, healthy_s: float) -> None:
        """The training ends well; each killed rank is a culprit, and no node; nothing is lost."""
        agents = self.agents
        agents.finish()
        agents.until_done()
        verdicts = until(
            lambda: {it["incident"]: it for it in agents.facts("verdict_reached")},
            "all are judged by all of their evidence", despite=CliError,
            holds=lambda last: sorted(it.get("culprit_ranks", []) for it in last.values())
            == sorted([rank] for rank in self.killed),
        )  # fmt: skip
        assert {it["kind"] for it in verdicts.values()} <= {"killed"}
        assert not any(it.get("culprit_nodes") for it in verdicts.values())
        assert len(agents.facts("round_formed")) == 1 + len(self.killed)
        assert agents.facts("node_lost") == agents.facts("node_suspected") == []
        nodes = [it for it in agents.api.pages("nodes", {}, most=None) if it["node"] in NODES]
        assert not any(it["strikes"] for it in nodes)
        facts, blobs = prove_recorded(self.cluster, agents)
        log.info(
            "%s: gap %.1f s, well after %.1f s, %d facts, %d blobs",
            *(what, pauses.longest_s, healthy_s, facts, blobs),
        )


@contextmanager
def training(
    cluster: Cluster,
    folder: Path,
    job: str,
    clock: WallClock | None = None,
    whose: str = "",
    restarts: str = "10",
) -> Iterator[Training]:
    """`clock` is that of node-1, of the services, or of all."""
    leader = cluster.leader("KV_ROUNDS")
    near, third = (name for name in NAMES if name != leader)
    stepped = {} if clock is None else clock.environment
    with services_of(cluster, folder, **(stepped if whose != "node-1" else {})) as services:
        services.start(third, (near, leader))
        (folder / job).mkdir()
        agents = Agents(folder / job, job, services)
        try:
            for node, server in zip(NODES, (near, third, leader), strict=True):
                services.agents_at = server
                own = stepped if whose in {node, "all"} else {}
                agents.steady(
                    "--nnodes", "3", "--nproc-per-node", "2", "--max-restarts", restarts,
                    node=node, **own,
                )  # fmt: skip
            agents.until_stepping(1)
            further(agents, 50)
            yield Training(cluster, services, agents)
        finally:
            agents.close()
