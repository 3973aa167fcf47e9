"""Thousands of agents that come within two minutes of each other, on a clock of numbers."""

import heapq
import itertools
import random
from dataclasses import dataclass

import pytest

from everstep.messages import Join, Joined, Report, RoundWaiting, StartRanks
from everstep_services.agent.core.round_part import ASK_AGAIN_S
from everstep_services.rendezvous.domain.events import Event, Probed, Tick
from tests.unit.rendezvous.world import World, names, spec

SKEW_S = 120.0
CLOSES_WITHIN_S = 15.0
"""After the last agent that the round cannot do without."""
_BATCH_S = 0.2
"""Whatever comes meanwhile is decided together, as while a document is written."""
_DELAY_S = 0.02
_START_S = 1.0


@dataclass
class Formed:
    """What a round took to form, by the clock of its own world."""

    required_s: float
    """When the last agent that it needs asked first."""
    closed_s: float
    members: int
    messages: int
    world: World
    refused: list[Joined]


class Skewed:
    """Agents that each come at a moment of their own, and ask again while they wait."""

    def __init__(self, world: World, agents: int, seed: int = 1) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.messages = 0
        self.refused: list[Joined] = []
        self.running: set[str] = set()
        self.came_s = sorted(self.rng.uniform(0.0, SKEW_S) for _ in range(agents))
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Event]] = []
        self._orders = 0
        for node, at in zip(names(agents), self.came_s, strict=True):
            self._later(world.now + at, world.ask(node))

    def run(self, until_s: float) -> float:
        """When the round ran, in seconds since the first might come."""
        world, began = self.world, self.world.now
        while world.now < began + until_s:
            world.now += _BATCH_S
            batch = []
            while self._queue and self._queue[0][0] <= world.now:
                batch.append(heapq.heappop(self._queue)[2])
            wake_at = world.last.wake_at if world.job is not None else None
            if batch or (wake_at is not None and wake_at <= world.now):
                self._decide(batch)
            if world.job is not None and world.doc.phase == "running":
                return world.now - began
        raise AssertionError(
            f"no round within {until_s:g} s: {world.doc.phase}, {world.doc.reason}"
        )

    def _decide(self, batch: list[Event]) -> None:
        world = self.world
        found = world.apply(*(batch or [Tick()]))
        self.messages += 2 * len(batch) + len(found.sends) + len(found.probes)
        for event, reply in zip(batch, found.replies, strict=False):
            if isinstance(event, Join):
                assert isinstance(reply, Joined)
                self._joined(event, reply)
        for probe in found.probes:
            self._later(world.now + _DELAY_S, Probed(probe.node, probe.instance, is_there=True))
        for node, order in world.orders[self._orders :]:
            if isinstance(order, StartRanks):
                assert node is not None
                self._start(node, order)
        self._orders = len(world.orders)

    def _joined(self, asked: Join, reply: Joined) -> None:
        if not reply.is_accepted or reply.exit_code is not None:
            self.refused.append(reply)
        if isinstance(reply.order, StartRanks):
            self._start(asked.node, reply.order)
        elif asked.node not in self.running:
            wait_s = ASK_AGAIN_S if reply.retry_after_s is None else reply.retry_after_s
            self._later(self.world.now + _DELAY_S + wait_s, self.world.ask(asked.node))

    def _start(self, node: str, order: StartRanks) -> None:
        if node in self.running:
            return
        self.running.add(node)
        started = Report(
            job="j", node=node, instance=f"{node}-1", slot=order.slot, round=order.round,
            event="started", reason="its ranks run",
        )  # fmt: skip
        self._later(self.world.now + self.rng.uniform(0.0, _START_S), started)

    def _later(self, at: float, event: Event) -> None:
        if isinstance(event, Join) and event.node in self.running:
            return
        heapq.heappush(self._queue, (at, next(self._numbers), event))


def formed(agents: int, least: int, most: int) -> Formed:
    """A job's first round, once all of its ranks run."""
    world = World(spec(least, nodes_max=most))
    skewed = Skewed(world, agents)
    closed_s = skewed.run(2 * SKEW_S)
    return Formed(
        required_s=skewed.came_s[least - 1],
        closed_s=closed_s,
        members=len(world.members()),
        messages=skewed.messages,
        world=world,
        refused=skewed.refused,
    )


@pytest.mark.parametrize(
    ("agents", "least", "most", "members"),
    [(2000, 2000, 2000, 2000), (2040, 2000, 2000, 2000), (1960, 1900, 2000, None)],
    ids=["all", "spares", "elastic"],
)
@pytest.mark.timeout(300)
def test_a_round_closes_soon_after_the_last_that_it_needs(
    agents: int, least: int, most: int, members: int | None
) -> None:
    """2,000 agents come within 120 s; the round closes 15 s after the last at most (A2.5)."""
    found = formed(agents, least, most)
    assert found.required_s > 0.9 * SKEW_S, "they were late"
    assert 0 <= found.closed_s - found.required_s <= CLOSES_WITHIN_S
    assert found.members == members or (members is None and least <= found.members <= agents)
    assert found.refused == [], "early nodes have waited, and were never turned away"
    assert found.world.doc.round == 1
    assert found.world.of(RoundWaiting), "and knows for what"


def test_the_number_of_messages_grows_with_the_agents() -> None:
    """Four times as many agents exchange four times as many messages (A2.5)."""
    few, many = (formed(agents, agents, agents) for agents in (250, 1000))
    assert few.messages / 250 == pytest.approx(many.messages / 1000, rel=0.05)
    most = 2 * (SKEW_S / ASK_AGAIN_S + 1) + 2 + 2
    assert many.messages / 1000 < most, "a question and its answer every 5 s, an order, a report"
