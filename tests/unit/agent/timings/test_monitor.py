"""What an agent tells of windows, whatever its ranks, their recorders and the service do."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstep import subjects
from everstep.bus.inbox import BoundedInbox
from everstep.messages import ClockReading, Message, NodeTimings, StragglersDocument, encode
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.timings import monitor, node_readings
from everstep_services.agent.timings.flight_recorders import SPARED
from everstep_services.agent.timings.monitor import (
    RoundPosition,
    TimingMonitor,
    TimingOptions,
    wanted_in,
)
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.worker_server import worker_server
from tests.waiting import until_async
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink, map_page
from trainer_sdk.page import make_page

JOB, NODE = "job", "node-1"
BEGAN_S = 5_000.0
WALL_S = 1_700_000_000.0
STEP_S = 0.125
LOOK_S = 0.5


class SteppedClock:
    """Moves when a test moves it, and with each wait."""

    def __init__(self) -> None:
        self.at_s = BEGAN_S

    def now(self) -> float:
        return self.at_s

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep(self, seconds: float) -> None:
        self.at_s += seconds


class Silence:
    def send(self, octets: bytes, /) -> int:
        return len(octets)


class Rank:
    """An unmodified one, whose optimizer has made a step every eighth of a second."""

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(exist_ok=True)
        path = str(folder / f"page {number}")
        page = make_page(path)
        link = AgentLink({})
        link.attach(map_page(path), Silence(), number=1, rank=number)
        self.words = link.words
        self.words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
        self.watched = WatchedRank(folder, page, pid=1)
        self.folder = folder

    def work(self, steps: int) -> None:
        seconds = self.words.cast("B").cast("d")
        for _ in range(steps):
            step = self.words[layout.STEPS] + 1
            seconds[layout.ENDS_AT + step % layout.ENDS_ENTRIES] = BEGAN_S + step * STEP_S
            self.words[layout.STEPS] = step


class Node:
    """Two ranks of a round, and their agent's measurements."""

    def __init__(self, folder: Path, bus: MemoryBus, inbox: BoundedInbox[NodeTimings]) -> None:
        self.clock = SteppedClock()
        self.ranks = {number: Rank(folder / str(number), number) for number in (4, 5)}
        self.place: RoundPosition | None = RoundPosition(3, 2, 8, 16, range(4, 6))
        self.timings = TimingMonitor(
            JOB, NODE, bus, self.clock, lambda: self.place, self._rank, "", self._wall
        )
        self._inbox = inbox

    def _rank(self, number: int) -> WatchedRank | None:
        known = self.ranks.get(number)
        return None if known is None else known.watched

    def _wall(self) -> float:
        return self.clock.now() + WALL_S

    async def work(self, steps: int, *ranks: int) -> list[NodeTimings]:
        """These ranks, by default all, make this number of steps; return the agent's report."""
        for number in ranks or self.ranks:
            self.ranks[number].work(steps)
        return await self.look(max(LOOK_S, steps * STEP_S))

    async def look(self, after_s: float = LOOK_S) -> list[NodeTimings]:
        """What the agent tells, some time later."""
        self.clock.at_s += after_s
        await self.timings._look()
        told = []
        while self._inbox._waiting:
            told.append(await self._inbox.get())
        return told


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
async def node(tmp_path: Path, server: MemoryServer) -> AsyncIterator[Node]:
    bus = MemoryBus(server)
    async with bus.subscribe(subjects.timing(JOB, NODE), NodeTimings) as inbox:
        yield Node(tmp_path, bus, inbox)


async def test_each_window_is_told_once_with_its_place(node: Node) -> None:
    assert await node.work(0) == []
    assert await node.work(15) == []
    (told,) = await node.work(3)
    assert (told.job, told.node, told.round) == (JOB, NODE, 3)
    assert (told.slot, told.slots, told.world) == (2, 8, 16)
    assert (told.first_step, told.last_step) == (1, 16)
    assert [(one.rank, one.steps, one.gap) for one in told.ranks] == [(4, 16, ""), (5, 16, "")]
    assert await node.look() == []
    (told,) = await node.work(14)
    assert (told.first_step, told.last_step, told.window_s) == (17, 32, 16 * STEP_S)
    whole = told.ranks[0].sections[0]
    assert (whole.section, whole.wall.count, whole.wall.sum_s) == ("", 16, 16 * STEP_S)
    assert told.ranks[0].collectives == ()


async def test_who_comes_late_begins_with_a_whole_window(node: Node) -> None:
    assert await node.work(5) == []
    assert await node.work(12) == []
    assert await node.work(8) == []
    (told,) = await node.work(8)
    assert (told.first_step, told.last_step) == (17, 32)
    assert told.ranks[0].sections[0].wall.count == 16


async def test_a_rank_that_lags_is_waited_for_but_not_for_long(node: Node) -> None:
    await node.work(0)
    await node.work(15)
    assert await node.work(4, 4) == []
    (told,) = await node.work(1, 5)
    assert [one.steps for one in told.ranks] == [16, 16]
    assert told.ranks[0].sections[0].wall.count == 15, "what came after is of the next window"
    assert await node.work(20, 4) == []
    assert await node.look(1.0) == []
    (told,) = await node.look(1.5)
    assert [one.steps for one in told.ranks] == [16, 0]
    assert told.ranks[1].gap == "it has not finished the window"


async def test_a_rank_that_is_gone_or_unreadable_is_a_gap(node: Node) -> None:
    await node.work(0)
    await node.work(10)
    node.ranks[5].watched.gone = True
    (told,) = await node.work(6, 4)
    assert [one.gap for one in told.ranks] == ["", "gone"]
    node.ranks[4].words[layout.SECTIONS] = 99
    assert await node.work(16, 4) == [], "nobody is left who could finish a window"
    node.ranks[5].watched.gone = False
    node.ranks[5].work(32)
    await node.look()
    (told,) = await node.look(3.0)
    assert told.ranks[0].gap.startswith("page unreadable: it names 99 sections")


async def test_windows_that_are_too_short_are_made_longer(node: Node) -> None:
    node.timings._wanted = TimingOptions(window_steps=1)
    await node.work(0)
    told = [one for _ in range(40) for one in await node.work(1)]
    steps = [(one.first_step, one.last_step) for one in told]
    assert steps[:2] == [(1, 1), (2, 2)], "the first step does not tell how long one takes"
    assert steps[2:] == [(first, first + 3) for first in range(5, 38, 4)]


async def test_another_round_begins_anew(node: Node, tmp_path: Path) -> None:
    await node.work(0)
    await node.work(10)
    node.ranks = {0: Rank(tmp_path / "again", 0)}
    node.place = RoundPosition(4, 0, 1, 1, range(1))
    assert await node.work(0) == []
    (told,) = await node.work(16)
    assert (told.round, told.first_step, told.last_step) == (4, 1, 16)
    assert [one.rank for one in told.ranks] == [0]
    node.place = None
    assert await node.work(16) == []


async def test_the_document_switches_and_sets_the_window(node: Node, server: MemoryServer) -> None:
    await node.work(0)
    assert node.ranks[4].words[layout.CPU_TIMED] == 1
    node.timings._wanted = TimingOptions(is_on=False)
    assert await node.work(40) == []
    assert node.ranks[4].words[layout.CPU_TIMED] == 0
    node.timings._wanted = TimingOptions(window_steps=4, is_cpu_timed=False)
    assert await node.work(0) == []
    assert node.ranks[4].words[layout.CPU_TIMED] == 0
    (told,) = await node.work(4)
    assert (told.first_step, told.last_step) == (41, 44)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (None, TimingOptions()),
        (b"{", TimingOptions()),
        (b'{"type":"limits_document.v1"}', TimingOptions()),
        (
            encode(StragglersDocument(job=JOB, is_on=False, window_steps=64, is_cpu_timed=False)),
            TimingOptions(is_on=False, window_steps=64, is_cpu_timed=False),
        ),
        (
            encode(StragglersDocument(job=JOB, is_on=True, window_steps=0)),
            TimingOptions(window_steps=1),
        ),
    ],
)
def test_what_is_wanted_is_in_the_document(data: bytes | None, wanted: TimingOptions) -> None:
    assert wanted_in(data) == wanted


async def test_a_new_document_is_followed(node: Node, server: MemoryServer) -> None:
    document = StragglersDocument(job=JOB, is_on=True, window_steps=8)
    documents = MemoryBus(server).documents("STRAGGLERS")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(node.timings.follow_for_ever())
        await documents.put(JOB, encode(document), revision=0)
        await until_async(
            lambda: _wanted(node), "it is followed", holds=lambda one: one.window_steps == 8
        )
        following.cancel()


async def _wanted(node: Node) -> TimingOptions:
    return node.timings._wanted


def recorded(first: int, last: int) -> bytes:
    """A collective in the middle of each step, and one long before."""
    entries = [
        {
            "collective_seq_id": step,
            "process_group": ["0", "default_pg"],
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[8]],
            "record_id": step,
            "time_created_ns": round((WALL_S + BEGAN_S + (step - 0.5) * STEP_S) * 1e9),
        }
        for step in range(first, last + 1)
    ]
    return json.dumps({"entries": entries}, separators=(",", ":")).encode()


async def test_collectives_of_the_window_are_told(node: Node) -> None:
    await node.work(0)
    await node.work(16)
    async with worker_server(node.ranks[4].folder, {"fr_trace_json": lambda: recorded(1, 40)}):
        (told,) = await node.work(17)
    one, other = told.ranks
    (series,) = one.collectives
    assert (series.group, series.first_sequence) == ("0 default_pg", 17)
    assert len(series.entered_us) == 16, "what was entered before or after is not of it"
    assert series.entered_us[1] - series.entered_us[0] == STEP_S * 1e6
    entered_s = WALL_S + BEGAN_S + 16.5 * STEP_S
    assert one.entries_from_s == pytest.approx(entered_s, abs=1e-5)
    assert (series.ops, set(series.op), series.section) == (("all_reduce 8",), {0}, ())
    assert (other.collectives, other.gap) == ((), ""), "it has opened no server"


async def test_a_recorder_that_is_silent_is_a_gap(node: Node) -> None:
    await node.work(0)
    async with worker_server(node.ranks[5].folder, {"fr_trace_json": lambda: None}):
        (told,) = await node.work(16)
    assert [one.gap for one in told.ranks] == ["", "recorder silent"]
    assert [one.steps for one in told.ranks] == [16, 16]


async def test_a_large_recorder_is_asked_less_often(node: Node) -> None:
    await node.work(0)
    large = recorded(1, 4000)
    async with worker_server(node.ranks[4].folder, {"fr_trace_json": lambda: large}) as asked:
        told = [one for _ in range(8) for one in await node.work(16)]
        assert len(told) == 8
        assert 0 < len(asked) < 8
        assert {one.ranks[0].gap for one in told} == {"", SPARED}


async def test_an_answer_that_comes_late_spares_no_recorder(node: Node) -> None:
    """A busy host takes long for little: sparing it would hide its ranks from all others (A6.1)."""
    await node.work(0)

    def slowly() -> bytes:
        node.clock.at_s += 0.9
        return recorded(1, 40)

    async with worker_server(node.ranks[4].folder, {"fr_trace_json": slowly}) as asked:
        told = [one for _ in range(4) for one in await node.work(16)]
    assert len(asked) == len(told)
    assert {one.ranks[0].gap for one in told} == {""}


@asynccontextmanager
async def clock_service(server: MemoryServer, node: Node) -> AsyncIterator[list[float]]:
    """A replica whose clock is 2 s behind; how long the way to it takes is what the test puts."""
    waits = [0.4, 0.01, 0.2, 0.3]
    asked: list[float] = []

    async def tell(question: Message) -> Message:
        wait_s = waits[len(asked) % 4]
        asked.append(wait_s)
        node.clock.at_s += wait_s / 2
        at_s = node._wall() - 2.0
        node.clock.at_s += wait_s / 2
        return ClockReading(clock="replica", at_s=at_s)

    async with MemoryBus(server).answer("straggler", {"clock": tell}):
        yield asked


async def test_the_quickest_answer_tells_how_far_clocks_are_apart(
    node: Node, server: MemoryServer
) -> None:
    await node.work(0)
    async with clock_service(server, node) as asked:
        (told,) = await node.work(16)
        assert len(asked) == 4
    (offset,) = told.clocks
    assert offset.clock == "replica"
    assert offset.offset_s == pytest.approx(2.0, abs=1e-6)
    assert offset.error_s == pytest.approx(0.005, abs=1e-6)
    assert (await node.work(16))[0].clocks == ()


async def test_a_service_that_does_not_answer_is_left_alone_for_a_while(
    node: Node, server: MemoryServer
) -> None:
    await node.work(0)
    assert (await node.work(16))[0].clocks == ()
    async with clock_service(server, node) as asked:
        assert (await node.work(16))[0].clocks == ()
        assert asked == []
        node.clock.at_s += 30.0
        assert len((await node.work(16))[0].clocks) == 1


async def test_without_the_bus_nothing_fails(node: Node, server: MemoryServer) -> None:
    await node.work(0)
    server.up = False
    assert await node.work(16) == []
    server.up = True
    told = await node.work(16)
    assert [one.last_step for one in told] == [16, 32]


async def test_where_nobody_counts_steps_windows_are_seconds_of_the_wall_clock(node: Node) -> None:
    """A script without steps is compared over the same seconds on every node."""
    assert await node.work(0) == []
    assert [await node.look(1.0) for _ in range(29)] == [[]] * 29, "the first step takes its time"
    assert await node.look(1.0) == []
    while (second := int(node._wall())) % 16 != 0:
        assert await node.look(1.0) == []
    async with worker_server(node.ranks[4].folder, {"fr_trace_json": lambda: entered(second + 15)}):
        for _ in range(15):
            assert await node.look(1.0) == []
        (told,) = await node.look(1.0)
    assert (told.is_by_time, told.first_step, told.last_step) == (True, second + 1, second + 16)
    assert told.window_s == 16.0
    one, other = told.ranks
    assert (one.steps, one.window_s, one.gap, other.gap) == (16, 16.0, "", "")
    (series,) = one.collectives
    assert (series.first_sequence, len(series.entered_us)) == (7, 1)
    assert one.sections == (), "there is no step whose length is known"


def entered(second: int) -> bytes:
    entry = {
        "collective_seq_id": 7,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": (second * 2 - 1) * 500_000_000,
    }
    return json.dumps({"entries": [entry]}, separators=(",", ":")).encode()


async def test_the_first_step_ends_windows_by_time(node: Node) -> None:
    await node.work(0)
    told = [one for _ in range(80) for one in await node.look(1.0)]
    assert {(one.is_by_time, one.last_step % 16) for one in told} == {(True, 0)}
    assert await node.work(4) == []
    assert await node.work(30) == [], "a part of a window"
    (first,) = await node.look()
    assert (first.is_by_time, first.first_step, first.last_step) == (False, 17, 32)


async def test_a_clock_that_is_set_makes_no_window_by_time(node: Node) -> None:
    await node.work(0)
    await node.look(30.0)
    assert await node.look(3600.0) == []
    told = [one for _ in range(40) for one in await node.look(1.0)]
    assert len(told) >= 1
    assert {one.last_step - one.first_step for one in told} == {15}


async def test_a_kernel_or_driver_that_hangs_costs_its_signals_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    read = node_readings.read_all

    def hanging(*what: Any) -> Any:
        goes_on.wait(60)
        return read(*what)

    monkeypatch.setattr(monitor, "read_all", hanging)
    monkeypatch.setattr(monitor, "_HOST_WITHIN_S", 0.01)
    try:
        await node.work(0)
        (told,) = await node.work(16)
        assert [(one.steps, one.host) for one in told.ranks] == [(16, None), (16, None)]
    finally:
        goes_on.set()
