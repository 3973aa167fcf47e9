"""What straggler refuses on a real bus: rounds that were not formed, changes without a number."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from everstep import ids
from everstep.bus.client import NatsBus
from everstep.bus.ports import Bus
from everstep.messages import RoundFormed, StepTimeShifted, StragglerCleared, StragglerFound, encode
from everstep_services.straggler.domain.changes import Change, SlowRankFound
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.replica import Straggler
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.integration.health.replicas import facts_of
from tests.integration.straggler.replicas import Nodes, SimpleJudge, at_work, found, said
from tests.unit.rendezvous.documents import seated
from tests.unit.straggler.changes import shift, slow
from tests.waiting import until_async

FAR = 2**53 - 1
"""The newest round that a message can name."""


async def form(bus: Bus, job: str, round_: int) -> None:
    """Rendezvous forms a round."""
    document = seated(job, ("n0", "n1"), round_=round_)
    await bus.documents("ROUNDS").put(job, encode(document), revision=None)


def formed(job: str, round_: int) -> RoundFormed:
    return RoundFormed(
        id=ids.new_id(), job=job, at=datetime.now(UTC), source="test", round=round_, members=(),
        world_size=2, waited_s=0.0, allocation="a",
    )  # fmt: skip


def refusals(straggler: Straggler, job: str) -> Mapping[str, int]:
    """What was refused of a job, by reason."""
    one = straggler.jobs.get(job)
    return {} if one is None else one.refused


async def test_timings_of_a_round_that_was_not_formed_clear_nothing(bus: NatsBus, job: str) -> None:
    """A job's own login may claim any round, and may record that it was formed (A6.2)."""
    await form(bus, job, 1)
    nodes, liar = Nodes(bus, job), Nodes(bus, job)
    liar.round = FAR
    async with at_work(bus) as straggler:
        nodes.send("n1")
        known = (await found(bus, job, 1)).found
        await bus.record(formed(job, FAR))
        liar.send()
        await until_async(
            lambda: refusals(straggler, job).get("round not formed"),
            "both are refused",
            holds=lambda count: count == 2,
        )
        nodes.send("n0", "n1")  # nobody is slower than the other: rank 1 keeps up
        (cleared,) = await said(bus, job, StragglerCleared, 1)
    assert isinstance(cleared, StragglerCleared)
    assert (cleared.finding, cleared.reason) == (known[0].finding, "it keeps up")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("n0", "victim"), "node without that slot"),  # a node of another job
        (("n1", "n0"), "node without that slot"),
        (("n0", "n1", "n2"), "another world"),
        (("n0",), "another world"),
    ],
)
async def test_a_login_tells_nothing_of_nodes_that_do_not_train_for_its_job(
    bus: NatsBus, job: str, names: tuple[str, ...], reason: str
) -> None:
    """What it claims of them names no rank, and hides none that is slow."""
    await form(bus, job, 1)
    nodes, liar = Nodes(bus, job), Nodes(bus, job, names)
    async with at_work(bus) as straggler:
        nodes.send()
        tracked = await until_async(lambda: straggler.jobs.get(job), "the job is known")
        await until_async(lambda: tracked.is_primed, "its round is known")
        liar.leap(1_000_000)
        for _ in range(3):
            liar.send("victim", times=10.0)
        await until_async(lambda: refusals(straggler, job).get(reason, 0), "it is refused")
        nodes.send("n1")
        known = await found(bus, job, 1)
    assert [one.node for one in known.found] == ["n1"]


async def test_a_node_tells_nothing_of_the_ranks_of_others(bus: NatsBus, job: str) -> None:
    await form(bus, job, 1)
    nodes, liar = Nodes(bus, job), Nodes(bus, job)
    liar.first_rank = 1
    async with at_work(bus) as straggler:
        nodes.send()
        tracked = await until_async(lambda: straggler.jobs.get(job), "the job is known")
        await until_async(lambda: tracked.is_primed, "its round is known")
        liar.send("n0")
        await until_async(
            lambda: refusals(straggler, job).get("rank of another node"),
            "both are refused",
            holds=lambda count: count == 2,
        )


async def test_a_new_round_is_heard_as_soon_as_rendezvous_has_formed_it(
    bus: NatsBus, job: str
) -> None:
    await form(bus, job, 1)
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        await form(bus, job, 2)
        await bus.record(formed(job, 2))
        tracked = straggler.jobs.get(job)
        assert tracked is not None
        await until_async(lambda: tracked.formed.newest == 2, "the round is known")
        nodes.round = 2
        nodes.send("n0")
        assert (await found(bus, job, 0)).round == 2
        assert not refusals(straggler, job)


async def test_a_new_round_is_heard_even_if_nothing_says_that_it_was_formed(
    bus: NatsBus, job: str
) -> None:
    await form(bus, job, 1)
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        await form(bus, job, 2)
        tracked = straggler.jobs.get(job)
        assert tracked is not None
        nodes.round = 2
        nodes.send("n0")
        await until_async(lambda: tracked.formed.newest == 2, "the round is known")
        nodes.send("n0")
        assert (await found(bus, job, 0)).round == 2


async def test_what_came_of_no_round_before_the_document_was_read_is_forgotten() -> None:
    clock, bus = FakeClock(), MemoryBus(MemoryServer())
    await form(bus, "j", 1)
    nodes, liar = Nodes(bus, "j"), Nodes(bus, "j")
    liar.round = FAR
    async with at_work(bus, clock=clock, make_judge=JobJudge) as straggler:
        liar.send()
        await until_async(lambda: straggler.jobs.get("j"), "it is heard")
        tracked = straggler.jobs.get("j")
        assert tracked is not None
        assert tracked.snapshot.round is None, "nothing is judged before the documents are read"
        await clock.advance(1.0)
        await until_async(lambda: tracked.is_primed, "the documents are read")
        nodes.send()

        async def heard_round() -> int | None:
            await clock.advance(1.0)
            return tracked.snapshot.round

        await until_async(heard_round, "the round that was formed is heard", holds=lambda n: n == 1)
        assert tracked.refused == {"round not formed": 2}, "the message of each node"


class _Immeasurable(SimpleJudge):
    """Its first judgement is full of numbers that are none."""

    def close_due(self, now: float) -> list[Change]:
        changes = super().close_due(now)
        if not any(type(one) is SlowRankFound for one in changes):
            return changes
        nan = float("nan")
        bad: Iterable[Change] = (
            slow(7, lost_s=nan),
            slow(8, lateness_s=nan),
            replace(shift(), now_s=nan),
        )
        return [*bad, *changes]


async def test_a_change_that_cannot_be_encoded_is_dropped_and_the_others_are_written(
    bus: NatsBus, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus, make_judge=_Immeasurable) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        assert refusals(straggler, job) == {"cannot be written": 3}
        failures = straggler.statistics()["document_failures_total"]
        assert failures >= 3, "documents that other tests left on the bus may be bad, too"
        nodes.send()
        await found(bus, job)
        assert len(await said(bus, job, StragglerFound, 1)) == 1
        assert not await facts_of(bus, StepTimeShifted, 0, job)
    assert not [one for one in caplog.messages if one.startswith("stragglers_not_written")]
    assert len([one for one in caplog.messages if "has a float that is nan" in one]) == 1
