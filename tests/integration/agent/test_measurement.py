"""Agents measure the network with each other over real connections, in turns."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from msgspec.structs import replace

from everstep.messages import Fact, MeasureNetwork, NetworkMeasured, NetworkPeer
from everstep.observe.redaction import redact
from everstep_services.agent.probes.network import pair_test
from everstep_services.agent.runtime import network_test
from everstep_services.agent.runtime.network_test import NetworkTestRunner
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.e2e.ports import free_port
from tests.fakes.clock import FakeClock
from tests.waiting import until_async

TOKEN = "token-of-one-network-test"
TEST = "0193aefc11e25f0a8c7d4b6e9f201c3d"


@pytest.fixture(autouse=True)
def no_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_test, "_LEAD_S", 0.0)


@pytest.fixture
def ports() -> list[int]:
    """Nobody listens there, and nobody else will."""
    return [free_port() for _ in range(3)]


class LoopClock(FakeClock):
    """Its time passes as threads get their turns: it stands while the machine does."""

    async def pass_for_ever(self) -> None:
        while True:
            await self.advance(0.005)
            await asyncio.to_thread(os.sched_yield)


class Nodes:
    """Agents of one job, as far as they measure."""

    def __init__(self, names: list[str], tasks: asyncio.TaskGroup) -> None:
        self.told: asyncio.Queue[Fact] = asyncio.Queue()
        clock = LoopClock()
        self.each = {
            name: NetworkTestRunner(name, clock, AgentFacts("j", name, clock), self.told.put_nowait)
            for name in names
        }
        self.loops = [tasks.create_task(one.measure_for_ever()) for one in self.each.values()]
        self.loops.append(tasks.create_task(clock.pass_for_ever()))

    def ask(self, order: MeasureNetwork) -> None:
        for one in self.each.values():
            one.ask(order)

    async def figures(self, count: int) -> dict[str, NetworkMeasured]:
        async with asyncio.timeout(40):
            facts = [await self.told.get() for _ in range(count)]
        found = [fact for fact in facts if isinstance(fact, NetworkMeasured)]
        return {fact.node: fact for fact in found}


@asynccontextmanager
async def measuring_nodes(*names: str) -> AsyncIterator[Nodes]:
    async with asyncio.TaskGroup() as tasks:
        nodes = Nodes(list(names), tasks)
        yield nodes
        for loop in nodes.loops:
            loop.cancel()


def order(ports: list[int], turn_s: float) -> MeasureNetwork:
    peers = tuple(
        NetworkPeer(node=f"n{number}", address="127.0.0.1", port=port)
        for number, port in enumerate(ports)
    )
    return MeasureNetwork(
        id=TEST,
        job="j",
        round=0,
        reason="slow",
        peers=peers,
        token=TOKEN,
        turns=len(peers) - 1 + len(peers) % 2,
        turn_s=turn_s,
    )


async def test_each_pair_is_measured_once_and_each_node_tells(ports: list[int]) -> None:
    async with measuring_nodes("n0", "n1", "n2", "bystander") as nodes:
        nodes.ask(order(ports, turn_s=60.0))
        told = await nodes.figures(3)
    assert set(told) == {"n0", "n1", "n2"}
    pairs = {frozenset((node, link.node)) for node, fact in told.items() for link in fact.links}
    assert pairs == {frozenset(("n0", "n1")), frozenset(("n0", "n2")), frozenset(("n1", "n2"))}
    assert sum(len(fact.links) for fact in told.values()) == 3
    for fact in told.values():
        assert (fact.test, fact.nodes, fact.reason) == (TEST, ("n0", "n1", "n2"), "")
        for link in fact.links:
            assert link.mib_s > 1
            assert link.round_trip_s is not None
    assert redact(f"it is {TOKEN}") == "it is ***"


async def test_a_node_that_is_not_there_is_not_reached_and_why_is_told(ports: list[int]) -> None:
    async with measuring_nodes("n0") as nodes:
        nodes.ask(order(ports[:2], turn_s=20.0))
        (fact,) = (await nodes.figures(1)).values()
    (link,) = fact.links
    assert (link.node, link.mib_s, link.round_trip_s) == ("n1", 0.0, None)
    assert link.reason == f"127.0.0.1:{ports[1]}: no process listens there"


async def test_a_silence_at_the_end_of_a_turn_hides_no_reason(
    ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def measure(*_: object, within_s: float) -> pair_test.Figures:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise pair_test.NetworkCheckError(f"reason {asked}")
        raise pair_test.PeerSilentError(f"it did not answer within {within_s:g} s")

    monkeypatch.setattr(pair_test, "measure", measure)
    async with measuring_nodes("n0") as nodes:
        nodes.ask(order(ports[:2], turn_s=20.0))
        (fact,) = (await nodes.figures(1)).values()
    assert asked > 3
    assert [link.reason for link in fact.links] == ["reason 2"]


async def test_a_port_that_somebody_else_has_is_told_by_whose_it_is(ports: list[int]) -> None:
    with closing(socket.create_server(("0.0.0.0", ports[1]))):
        async with measuring_nodes("n1") as nodes:
            nodes.ask(order(ports[:2], turn_s=0.5))
            (fact,) = (await nodes.figures(1)).values()
    assert fact.links == ()
    assert fact.reason == f"0.0.0.0:{ports[1]} cannot be listened on: Address already in use"


async def test_turns_that_have_passed_during_another_test_are_not_made_up_for(
    ports: list[int],
) -> None:
    async with measuring_nodes("n0") as nodes:
        late = replace(order(ports[:2], turn_s=0.2), id="f" * 32)  # over when the first one is
        nodes.ask(order(ports[1::-1], turn_s=0.5))
        nodes.ask(late)
        async with asyncio.timeout(40):
            facts = [await nodes.told.get() for _ in range(2)]
    last = facts[1]
    assert isinstance(last, NetworkMeasured)
    assert (last.links, last.reason) == ((), "another test was still going on")


async def test_a_test_for_which_a_round_waited_gives_way_to_a_newer_one(ports: list[int]) -> None:
    """And the same order, which each replica of rendezvous may send, is obeyed once."""
    async with measuring_nodes("n0") as nodes:
        waited_for = replace(order(ports[:2], turn_s=1e6), has_sums=True)
        nodes.ask(waited_for)
        await until_async(lambda: nodes.each["n0"]._summing is not None, "it measures")
        nodes.ask(waited_for)
        assert not nodes.each["n0"]._summing.cancelling()  # type: ignore[union-attr]
        nodes.ask(replace(order(ports[1::-1], turn_s=0.5), id="f" * 32))
        (fact,) = (await nodes.figures(1)).values()
        assert nodes.each["n0"].figures is not None
    assert (fact.test, nodes.each["n0"].figures.test) == ("f" * 32, "f" * 32)
