"""Agents killed and replaced again and again: every round has four different holders of slots."""

import random
from collections.abc import Iterator
from functools import partial
from operator import lt
from pathlib import Path

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.control_planes import PATIENT, Pieces, Up, running_up
from tests.waiting import until

NODES = ("node-1", "node-2", "node-3", "node-4", "node-5")
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.fixture
def own_up(tmp_path: Path) -> Iterator[Up]:
    folder = tmp_path / "up"
    folder.mkdir()
    # A slot waits for the node that had it, however long that takes.
    with running_up(folder, **PATIENT, EVERSTEP_RENDEZVOUS__LAST_CALL_S="30") as up:
        yield up


@pytest.fixture
def five(tmp_path: Path, own_up: Up, job: str) -> Iterator["Five"]:
    folder = tmp_path / job
    folder.mkdir()
    five = Five(Cluster(folder, job, own_up))
    yield five
    five.cluster.close()


class Five:
    """Five agents for four slots."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agents: dict[str, Agent] = {}

    def start(self, node: str) -> None:
        self.agents[node] = self.cluster.steady(
            *("--nnodes", "4", "--spares", "1", "--stop-grace", "1", "--console", "none"),
            *("--max-restarts", "none", "--no-progress-limit", "none"),
            node=node,
        )

    def holders(self, number: int) -> list[str]:
        members = self.cluster.members(number)
        return [members[slot] for slot in sorted(members)]

    def end(self) -> None:
        self.cluster.finish()
        assert {node: agent.wait() for node, agent in self.agents.items()} == dict.fromkeys(
            self.agents, 0
        )


def test_fifty_agents_killed_at_random(five: Five, dice: random.Random) -> None:
    """Always with a new agent as the spare before the next one dies, whichever it is (A2.1)."""
    for node in NODES:
        five.start(node)
    five.cluster.until_stepping(1)
    walls, named = [], 0
    for number in range(1, 51):
        before = five.holders(number)
        (spare,) = set(NODES) - set(before)
        joined_again(five, spare)
        victim = dice.choice(before)
        agent = five.agents[victim]
        if dice.random() < 0.5:
            agent.kill_node()
        else:
            agent.kill()
        five.cluster.until_stepping(number + 1)
        after = five.holders(number + 1)
        assert after == [spare if node == victim else node for node in before]
        incident = five.cluster.closed(number)[-1]
        walls.append(incident["ledger"]["wall_s"])
        named += f"{victim} is gone" in incident["story"]
        five.start(victim)
    five.end()
    walls.sort()
    print(f"seconds until the next step: median {walls[25]:.2f}, worst {walls[-1]:.2f}")
    print(f"the lost node was named as the cause {named} times of 50")
    assert walls[-1] < 10
    assert five.cluster.state()["state"] == "done"


def joined_again(five: Five, node: str) -> None:
    """As many times as it was started."""
    starts = sum(agent.node == node for agent in five.cluster.agents)

    until(
        lambda: [one["node"] for one in five.cluster.facts("node_joined")].count(node),
        f"{node} has joined {starts} times",
        holds=lambda times: times >= starts,
    )


def test_two_hundred_rounds_with_five_agents_for_four_slots(
    five: Five, dice: random.Random
) -> None:
    """Nobody is lost: four keep their slots, in any order of return; one stands by (A2.2)."""
    order = list(NODES)
    dice.shuffle(order)
    for node in order:
        five.start(node)
    five.cluster.until_stepping(1)
    first = five.holders(1)
    for number in range(1, 201):
        five.cluster.until_stepping(number)
        five.cluster.kill_rank(dice.randrange(4), number)
    five.cluster.until_stepping(201)
    five.end()
    formed = five.cluster.facts("round_formed")
    assert [one["round"] for one in formed] == [*range(1, 202)]
    for one in formed:
        assert [member[1] for member in one["members"]] == first
        assert one["round"] == 1 or len(one["spares"]) == 1
    assert five.cluster.facts("node_lost") == []


def test_services_killed_at_random_while_a_training_runs(
    tmp_path: Path, job: str, dice: random.Random
) -> None:
    """Forty times one, two or four services die: one round, no incident (A2.6, A15.1)."""
    (tmp_path / "pieces").mkdir()
    (tmp_path / job).mkdir()
    pieces = Pieces(tmp_path / "pieces", **PATIENT)
    cluster = Cluster(tmp_path / job, job, pieces)
    try:
        pieces.start()
        for node in ("node-1", "node-2"):
            cluster.steady("--nnodes", "2", node=node)
        cluster.until_stepping(1)
        saved = cluster.folder / "step"
        for _ in range(40):
            names = dice.sample(sorted(pieces.processes), dice.choice([1, 1, 2, 4]))
            pieces.kill(*names)
            goal = int(saved.read_text()) + dice.choice([1, 20, 200])
            until(lambda: int(saved.read_text()), f"beyond step {goal}", holds=partial(lt, goal))
            for name in dice.sample(names, len(names)):
                pieces.revive(name)
        cluster.kill_rank(1, 1)
        cluster.until_stepping(2)
        cluster.finish()
        cluster.until_done()
        assert [one["trigger"] for one in cluster.incidents()] == ["rank_exited"]
        assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    finally:
        cluster.close()
        pieces.stop()
