"""States in the memory of nodes: released, and copied where too few are left."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    ChangeCheckpoint,
    Done,
    Message,
    NodeLost,
    OperatorActed,
    ReplicaLost,
    ReplicationDegraded,
    ReplicationRestored,
    RequestCopy,
    RequestRelease,
    RoundDocument,
)
from everstep.messages.documents.rounds import Replication, Seat
from tests.integration.catalog.job import JOB, opened_bus, seen
from tests.integration.catalog.replicas import (
    QUICK,
    about,
    at_work,
    formed,
    places,
    stored,
)
from tests.integration.health.replicas import facts_of
from tests.unit.rendezvous.documents import round_document
from tests.waiting import until_async


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with opened_bus(nats, tmp_path) as bus:
        yield bus


class Rendezvous:
    """Stands for rendezvous: shows a round of four nodes, and hears who is to copy what."""

    def __init__(self) -> None:
        self.asked: list[RequestCopy] = []
        self.gone = ""

    async def show(self, _: Message) -> RoundDocument:
        seats = tuple(
            Seat(
                node=f"n{n}",
                slot=n,
                ranks=1,
                address=f"10.0.0.{n}",
                stage="gone" if f"n{n}" == self.gone else "running",
                failure_domain=f"rack-{n % 2}",
                replica_port=7000 + n,
            )
            for n in range(4)
        )
        how = Replication(key="secret", factor=2)
        return msgspec.structs.replace(
            round_document(JOB, seats=4, name_characters=20),
            round=1,
            seats=seats,
            replication=how,
        )

    async def copy(self, question: Message) -> Done:
        assert isinstance(question, RequestCopy)
        self.asked.append(question)
        return Done(text="asked")


async def test_images_are_released_by_the_agents_that_have_them(bus: NatsBus) -> None:
    asked: list[Message] = []

    async def release(question: Message) -> Done:
        asked.append(question)
        is_first = len(asked) == 1
        return Done(text="all nodes are asked" if is_first else "over", is_refused=not is_first)

    ask = ChangeCheckpoint(
        job=JOB, step=20, action="release", tier="memory", by="ann", reason="the data was bad"
    )
    async with at_work(bus), bus.answer("rendezvous", {"release": release}):
        done = await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=30)
        assert done.text.startswith("all nodes are asked for states of step 20")
        done = await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=30)
        assert (done.is_refused, done.text) == (True, "over")
    one = asked[0]
    assert isinstance(one, RequestRelease)
    assert (one.step, one.by, one.reason) == (20, "ann", "the data was bad")
    acted = await facts_of(bus, OperatorActed, 2)
    assert [(fact.action, fact.target, fact.outcome) for fact in acted] == [
        ("release_checkpoint", "step 20 (memory)", "accepted"),
        ("release_checkpoint", "step 20 (memory)", "refused"),
    ]


async def test_too_few_copies_are_said_repaired_and_said_to_be_over(bus: NatsBus) -> None:
    """A node is lost: copies are ordered elsewhere, and the record has both (A9.5)."""
    rendezvous = Rendezvous()
    await bus.record(formed(JOB, 4))
    for slot in range(4):
        await bus.record(stored(JOB, slot, f"n{slot ^ 1}"))
    async with (
        bus.answer("rendezvous", {"show": rendezvous.show, "copy": rendezvous.copy}),
        at_work(bus, msgspec.structs.replace(QUICK, degraded_after_s=3600.0)),
    ):
        (place,) = await until_async(
            lambda: places(bus, JOB),
            "all are held",
            holds=lambda all_: [one.survivable_losses for one in all_] == [1],
        )
        assert (place.tier, place.step) == ("peer", 100)
        assert [one.node for one in place.replicas[2].holders] == ["n2", "n3"]
        assert place.replicas[2].holders[0].port == 7002
    async with (  # all of it is known now: half of it would be too few copies, too
        bus.answer("rendezvous", {"show": rendezvous.show, "copy": rendezvous.copy}),
        at_work(bus),
    ):
        rendezvous.gone = "n3"
        lost = NodeLost(**about(JOB), node="n3", silence_s=3.2, limit_s=3, reason="silent")
        await bus.record(lost)
        await until_async(
            lambda: rendezvous.asked, "copies are asked for", holds=lambda asked: len(asked) == 2
        )
        asked = [(one.owner_slot, one.step, one.holder) for one in rendezvous.asked]
        assert asked == [(2, 100, "n2"), (3, 100, "n2")]
        for one in rendezvous.asked:
            assert one.to == "n1"  # in another rack than n2, and n3 is lost
            await bus.record(stored(JOB, one.owner_slot, one.to))
        await until_async(
            lambda: seen(bus, ReplicationRestored), "enough may be lost again", holds=bool
        )
    degraded = await seen(bus, ReplicationDegraded)
    assert degraded[0].slots == (2, 3)
    assert (degraded[0].wanted_losses, degraded[0].survivable_losses) == (1, 0)
    gone = await seen(bus, ReplicaLost)
    assert sorted((fact.owner_slot, fact.holder) for fact in gone) == [(2, "n3"), (3, "n3")]
