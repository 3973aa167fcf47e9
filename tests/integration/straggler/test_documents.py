"""The documents that straggler and its agents read and write, over a real bus."""

from functools import partial

from everstep.bus.client import NatsBus
from everstep.bus.errors import SpoolFullError
from everstep.messages import (
    Fact,
    RankScoreTable,
    ShowScores,
    StragglerFound,
    StragglersDocument,
    decode,
    decode_as,
)
from everstep_services.health.nodes.control import blank, switched
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.integration.straggler.replicas import Nodes, at_work, document, found, switch
from tests.waiting import until_async


async def test_agents_are_told_how_to_measure(bus: NatsBus, job: str) -> None:
    """Timings are switched off and on, and windows set, while it runs (A6.5)."""
    nodes = Nodes(bus, job)
    wait = partial(until_async, partial(document, bus, job), "agents can read it")
    async with at_work(bus) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        assert (await wait(holds=lambda it: it.window_steps == 100)).is_on
        fixed = switched(blank(), {"straggler.window_steps": "7", "straggler.cpu": "off"}, "a", "")
        await switch(bus, job, fixed)
        assert not (await wait(holds=lambda it: it.window_steps == 7)).is_cpu_timed
        off = switched(fixed, {"straggler.timings": "off"}, "a", "")
        await switch(bus, job, off)
        assert (await wait(holds=lambda it: not it.is_on)).found == ()
        nodes.send("n1")
        await until_async(
            lambda: straggler.statistics()["refused_total"],
            "windows that were on their way",
            holds=lambda n: n == 2,
        )
        table = await bus.ask(
            "straggler", "scores", ShowScores(job=job), RankScoreTable, job=job, within_s=30
        )
        assert (table.is_on, table.window_steps) == (False, 7)
        assert table.said == "timings are off: switch on straggler.timings"
    async with at_work(bus):  # nobody sends anything: the document must do
        await switch(bus, job, fixed)
        await wait(holds=lambda it: it.is_on)
        nodes.send("n1")
        await found(bus, job, 1)


async def test_the_limit_of_a_finding_is_a_switch(bus: NatsBus, job: str) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        ratio = switched(blank(), {"straggler.slower_ratio": "3"}, "a", "")
        await switch(bus, job, ratio)
        nodes.send("n1")
        await until_async(
            lambda: straggler.statistics()["ratio_max"],
            "a window is judged",
            holds=lambda most: most == 1.0,
        )
        assert (await found(bus, job)).found == ()
        nodes.send("n1", times=5.0)
        await found(bus, job, 1)


async def test_a_document_that_cannot_be_read_is_neither_followed_nor_written_over(
    bus: NatsBus, job: str
) -> None:
    documents = bus.documents("STRAGGLERS")
    await documents.put(job, b'{"type":"stragglers_document.v9"}', revision=None)
    other = f"{job}-other"
    async with at_work(bus):
        Nodes(bus, job).send("n1")
        Nodes(bus, other).send("n1")
        await found(bus, other, 1)
        assert (await documents.get(job)).data == b'{"type":"stragglers_document.v9"}'


class _FullBus(MemoryBus):
    """Its disk takes nothing until somebody makes room."""

    is_full = True

    async def record(self, *facts: Fact) -> None:
        if self.is_full:
            raise SpoolFullError("full")
        await super().record(*facts)


async def test_facts_wait_in_the_document_while_the_disk_is_full() -> None:
    server = MemoryServer()
    bus = _FullBus(server)

    async def outbox() -> int | None:
        seen = await bus.documents("STRAGGLERS").get("j")
        return None if seen.data is None else len(decode_as(seen.data, StragglersDocument).outbox)

    async with at_work(bus):
        Nodes(bus, "j").send("n1")
        await until_async(outbox, "the fact waits", holds=lambda count: count == 1)
        bus.is_full = False
        await until_async(outbox, "it is on record", holds=lambda count: count == 0)
    assert [type(decode(one.data)) for one in server.facts] == [StragglerFound]
