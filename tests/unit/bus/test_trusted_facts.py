"""Facts about nodes are believed once rendezvous knows the node in the job that tells them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from everstep.bus.facts.trusted_facts import TrustedFacts
from everstep.messages import Fact, NodeCheckFinished, RoundDocument, encode
from everstep_services.health.nodes.evidence import accused
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.unit.rendezvous.documents import seated

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def checked(number: int, node: str, job: str = "j") -> NodeCheckFinished:
    return NodeCheckFinished(
        id=f"{job}-{number}", job=job, at=NOON, source=f"agent/{node}", node=node,
        occasion="join", is_healthy=False, took_s=1.0,
    )  # fmt: skip


class Gate:
    """It, with a clock that the test moves and what rendezvous has written."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._bus = MemoryBus(MemoryServer())
        self.seated = TrustedFacts(self._bus, self.clock, accused)

    async def write(self, document: RoundDocument) -> None:
        await self._bus.documents("ROUNDS").put(document.job, encode(document), revision=None)

    async def passed(self, *facts: Fact, after_s: float = 0.0) -> Sequence[str]:
        await self.clock.advance(after_s)
        return [fact.id for fact in await self.seated.passed(facts)]


async def test_only_nodes_with_a_seat_in_the_job_are_believed() -> None:
    gate = Gate()
    await gate.write(seated("j", ["n0"], former=["n1"]))
    await gate.write(seated("k", ["victim"]))
    forged, unknown = checked(9, "victim"), checked(1, "n0", job="of-another-launcher")
    assert await gate.passed(forged, checked(0, "n0"), checked(1, "n1"), unknown) == ["j-0", "j-1"]
    assert await gate.passed(after_s=29) == []
    assert gate.seated.refused == 0
    assert await gate.passed(after_s=1) == []
    assert gate.seated.refused == 2


async def test_what_is_said_of_a_node_before_it_joins_waits_in_order() -> None:
    gate = Gate()
    assert await gate.passed(checked(0, "n0")) == []
    await gate.write(seated("j", ["n0"]))
    assert await gate.passed(checked(1, "n0")) == [], "it is not read all the time"
    assert await gate.passed(checked(1, "n0"), checked(2, "n0"), after_s=1) == ["j-0", "j-1", "j-2"]


async def test_a_node_that_is_refused_as_unhealthy_is_believed() -> None:
    gate = Gate()
    document = seated("j", ["n0"])
    await gate.write(replace(document, refused=("n1 unhealthy",)))
    assert await gate.passed(checked(0, "n1")) == ["j-0"]


async def test_a_flood_of_one_job_makes_no_other_wait_in_vain() -> None:
    gate = Gate()
    flood = [checked(number, f"x{number}") for number in range(5000)]
    assert await gate.passed(*flood, checked(0, "n0", job="k")) == []
    assert gate.seated.refused == 4900
    await gate.write(seated("k", ["n0"]))
    assert await gate.passed(after_s=1) == ["k-0"]
