"""Collectives as signs of progress: what a recorder says, and what follows from it."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.collectives import CollectiveState, parse_collectives
from everstep_services.agent.stalls.judge import Excused, Stalled, StallJudge
from everstep_services.agent.stalls.limits import Limit, LimitRules, StallLimits
from everstep_services.agent.stalls.monitor import RankStanding
from everstep_services.agent.stalls.rank_view import ActivitySigns
from everstep_services.agent.stalls.sampler import RankSampler, look_every_s, silent_after_s
from everstep_services.agent.telemetry.progress import beat_of
from tests.fakes.clock import FakeClock
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages, limits_of
from tests.unit.worker_server import worker_server
from trainer_sdk import layout
from trainer_sdk.page import make_page

NS = 10**9


def entry(record: int, at_s: float = 0.0, *, retired: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "record_id": record, "retired": retired, "time_created_ns": round(at_s * NS),
        "profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], **more,
    }  # fmt: skip


def trace(*entries: dict[str, Any], **enqueued: int) -> bytes:
    """As torch 2.13 writes it: numbers of collectives are strings, and other fields are there."""
    status = {
        group: {"last_enqueued_collective": str(count), "last_started_collective": "-1"}
        for group, count in enqueued.items()
    }
    return json.dumps({"entries": entries, "pg_status": status, "version": "2.10"}).encode()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"nccl_comm_state":{},"pg_status":{},"version":"2.10"}', CollectiveState(0, "")),
        # Gloo lists all that is recorded, also what is over.
        (
            trace(entry(0, 1.0), entry(1, 2.5, retired=False), g0=2),
            CollectiveState(2, "gloo:all_reduce of default_pg", 2.5),
        ),
        (trace(entry(0, 1.0), entry(1, 2.5), g0=1, g1=1), CollectiveState(2, "", 2.5)),
        # NCCL lists what goes on, and has its numbers as they are.
        (
            b'{"entries":[],"pg_status":{"0":{"last_enqueued_collective":7}}}',
            CollectiveState(7, ""),
        ),
        # What is sent to one rank is in no group's count.
        (
            trace(entry(9, 3.0, retired=False, profiling_name="nccl:send", process_group=[]), g0=2),
            CollectiveState(10, "nccl:send", 3.0),
        ),
        # What all ranks enter has a number that is the same in all of them.
        (
            trace(
                entry(0, 1.0, collective_seq_id=4),
                entry(1, 2.0, collective_seq_id="5", retired=False),
                g0=5,
            ),
            CollectiveState(5, "gloo:all_reduce of default_pg", 2.0, {"0": 5}, ("0", 5)),
        ),
        # Who is in another one, too, may wait for others.
        (
            trace(
                entry(0, 1.0, retired=False, collective_seq_id=4, process_group=["1", "half"]),
                entry(1, 2.0, collective_seq_id=5, retired=False),
                g0=5,
                g1=4,
            ),
            CollectiveState(9, "gloo:all_reduce of half", 2.0, {"0": 5, "1": 4}),
        ),
        # A framework calls its collectives in a group of its own.
        (
            trace(
                entry(0, 1.0, collective_seq_id=1),
                entry(1, 2.0, collective_seq_id=4, retired=False, process_group=["1", "half"]),
                entry(2, 2.5, collective_seq_id=5, retired=False, process_group=["1", "half"]),
                g0=1,
                g1=5,
            ),
            CollectiveState(6, "gloo:all_reduce of half", 2.5, {"0": 1, "1": 5}, ("1", 4)),
        ),
        (
            trace(entry(0, 1.0, collective_seq_id=4, is_p2p=True, retired=False), g0=2),
            CollectiveState(2, "gloo:all_reduce of default_pg", 1.0),
        ),
        (b"<html>", None),
        (b'{"pg_status":{"0":{"last_enqueued_collective":"many"}}}', None),
        (b'{"entries":"none"}', None),
    ],
)
def test_what_a_recorder_says(body: bytes, found: CollectiveState | None) -> None:
    assert parse_collectives([body]) == found


def test_parts_of_a_split_group_have_different_names_and_all_ranks_of_a_part_the_same() -> None:
    """Torch names all parts alike that it splits off an NCCL communicator."""

    def group_of(rank: int, *members: int) -> str:
        waits = entry(rank, collective_seq_id=4, retired=False, process_group=["1", "mesh_tp"])
        document = json.loads(trace(waits, g1=4))
        document["pg_config"] = {"1": {"name": "1", "desc": "mesh_tp", "ranks": str([*members])}}
        state = parse_collectives([json.dumps(document).encode()])
        assert state is not None
        assert state.awaits is not None
        group, number = state.awaits
        assert (number, state.entered_in) == (4, {group: 4})
        return group

    first, same, other = group_of(0, 0, 1), group_of(1, 0, 1), group_of(2, 2, 3)
    assert first == same != other


class Recorder:
    """A rank's flight recorder, and the agent that looks at it."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.whole = self.active = trace()
        self.closer = RankSampler(clock)
        self._silent = {0: WatchedRank(folder, make_page(str(folder / "page")))}
        self.answers = {
            "fr_trace_json?onlyactive=true": lambda: self.active,
            "fr_trace_json?onlyactive=false": lambda: self.whole,
        }

    def wall_s(self) -> float:
        return self.clock.wall().timestamp()

    async def look(self) -> ActivitySigns:
        await self.closer.look(self._silent)
        return self.closer.signs(0)


@pytest.fixture
def recorder(tmp_path: Path, clock: FakeClock) -> Recorder:
    return Recorder(tmp_path, clock)


async def test_a_rank_without_a_recorder_is_judged_by_its_page(recorder: Recorder) -> None:
    signs = await recorder.look()
    assert (signs.collective_s, signs.collective, recorder.closer.entered(0)) == (None, None, None)


async def test_gloo_says_when_the_last_collective_was_entered(
    recorder: Recorder, tmp_path: Path
) -> None:
    clock = recorder.clock
    async with worker_server(tmp_path, recorder.answers) as asked:
        recorder.active = trace(entry(0, recorder.wall_s() - 40), g0=1)
        first = await recorder.look()
        assert first.collective_s == pytest.approx(clock.now() - 40, abs=0.001)
        assert (first.collective, recorder.closer.entered(0)) == ("", 1)
        await clock.advance(5)
        recorder.active = trace(entry(1, recorder.wall_s() - 3, retired=False), g0=2)
        second = await recorder.look()
        assert second.collective_s == pytest.approx(clock.now() - 3, abs=0.001)
        assert second.collective == "gloo:all_reduce of default_pg"
        assert recorder.closer.collective(0, clock.now() - 3) == second.collective
        assert recorder.closer.collective(0, clock.now()) is None, "not since it moved"
        await clock.advance(5)
        assert await recorder.look() == second  # it stands
    assert {one.partition("?")[2].partition("&")[0] for one in asked} == {"onlyactive=true"}


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_a_wall_clock_that_is_set_makes_nobody_early_or_late(
    recorder: Recorder, tmp_path: Path, jump_s: float
) -> None:
    """The time of a collective stays right when the clock jumps by an hour (A3.1)."""
    clock = recorder.clock
    async with worker_server(tmp_path, recorder.answers):
        recorder.active = trace(entry(0, recorder.wall_s()), g0=1)
        await recorder.look()
        looked_at = clock.now()
        await clock.advance(5)
        recorder.active = trace(entry(1, recorder.wall_s() - 2 + jump_s), g0=2)
        signs = await recorder.look()
        assert signs.collective_s is not None
        assert looked_at <= signs.collective_s <= clock.now()


async def test_with_nccl_a_rank_that_stands_is_asked_when_it_stopped(
    recorder: Recorder, tmp_path: Path
) -> None:
    """What is over is not listed, and its recorder is large: the whole is asked for once."""
    clock = recorder.clock
    async with worker_server(tmp_path, recorder.answers) as asked:
        recorder.active = trace(g0=100)
        assert (await recorder.look()).collective_s is None
        await clock.advance(5)
        recorder.active = trace(g0=150)
        recorder.whole = trace(entry(149, recorder.wall_s() - 4), g0=150)
        moved = await recorder.look()
        assert moved.collective_s == clock.now()  # at the latest: nobody is judged too early
        assert not [one for one in asked if "onlyactive=false" in one]
        stopped_s = clock.now() - 4
        await clock.advance(5)
        stands = await recorder.look()
        assert stands.collective_s == pytest.approx(stopped_s, abs=0.001)
        assert [one for one in asked if "onlyactive=false" in one]


async def test_whether_the_transfers_of_a_batch_are_over_only_the_whole_trace_tells(
    recorder: Recorder, tmp_path: Path
) -> None:
    part = entry(0, retired=False, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=1)
    close = {**part, "record_id": 1, "profiling_name": "nccl:coalesced", "state": "completed"}
    recorder.active, recorder.whole = trace(part), trace(part, close)
    async with worker_server(tmp_path, recorder.answers):
        assert (await recorder.look()).collective == ""


async def test_what_was_asked_in_one_round_is_not_known_in_the_next(
    recorder: Recorder, tmp_path: Path
) -> None:
    def another_round_begins() -> bytes:
        recorder.closer.begins()
        return trace(entry(0, recorder.wall_s()), g0=1)

    async with worker_server(tmp_path, {"fr_trace_json": another_round_begins}):
        assert await recorder.look() == ActivitySigns()
        assert recorder.closer.entered(0) is None


async def test_a_recorder_that_does_not_answer_any_more_is_no_sign_of_progress(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with worker_server(tmp_path, recorder.answers):
        recorder.active = trace(entry(0, recorder.wall_s(), retired=False), g0=1)
        before = await recorder.look()
    await recorder.clock.advance(5)
    after = await recorder.look()
    assert (after.collective_s, after.collective) == (before.collective_s, None)
    assert recorder.closer.entered(0) == 1


@pytest.mark.parametrize("shortest_s", [1800.0, 120.0, 6.0, 1.5])
def test_ranks_are_looked_at_twice_before_the_shortest_limit(shortest_s: float) -> None:
    limits = StallLimits(LimitRules(configured={"outside": shortest_s}))
    assert silent_after_s(limits) + 2 * look_every_s(limits) <= shortest_s / 2
    assert (look_every_s(limits), silent_after_s(limits)) <= (5.0, 30.0)


@pytest.fixture
def pages() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class TestWhoIsMissing:
    """Rank 0 waits in a collective that rank 1 has not entered."""

    @pytest.fixture
    def ranks(self, tmp_path: Path, pages: Clock) -> list[StallRank]:
        ranks = [StallRank(tmp_path, rank, pages) for rank in range(2)]
        for rank in ranks:
            rank.link.up()
            rank.link.words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
            self.step(rank, pages)
            pages.now += 0.5  # rank 1 was the slower one
        ranks[0].signs = ActivitySigns(idle_s=9.0, waits_in="gloo:all_reduce", is_recorded=True)
        ranks[1].signs = ActivitySigns(idle_s=9.0, is_recorded=True)
        return ranks

    @staticmethod
    def step(rank: StallRank, clock: Clock) -> None:
        rank.link.words[layout.STEPS] = rank.link.words[layout.STEP] = 1
        rank.link.words[layout.PROGRESS_NS] = clock.ns()

    def news(self, ranks: list[StallRank], clock: Clock, at_s: float) -> list[tuple[type, int]]:
        clock.now = 1000.0 + at_s
        found = self.judge.look([rank.view() for rank in ranks], clock.now)
        return [(type(one), one.place.rank) for one in found if isinstance(one, Stalled | Excused)]

    @property
    def judge(self) -> StallJudge:
        if not hasattr(self, "_judge"):
            self._judge = StallJudge(limits_of(outside=60), 1000.0)
        return self._judge

    def test_is_named_though_it_moved_last(self, ranks: list[StallRank], pages: Clock) -> None:
        assert self.news(ranks, pages, 59.9) == []
        assert self.news(ranks, pages, 60.2) == [(Excused, 0)]
        assert self.news(ranks, pages, 60.5) == [(Stalled, 1), (Stalled, 0)]

    def test_is_named_first_of_two_that_count_their_own_steps(
        self, ranks: list[StallRank], pages: Clock
    ) -> None:
        self._judge = StallJudge(limits_of(step=60), 1000.0)
        for rank in ranks:
            rank.link.words[layout.COUNTED_BY] = layout.BY_SDK
            rank.looked_s = 1060.4
        assert self.news(ranks, pages, 60.5) == [(Stalled, 1), (Stalled, 0)]

    def test_nobody_is_excused_by_a_rank_of_which_that_is_not_known(
        self, ranks: list[StallRank], pages: Clock
    ) -> None:
        ranks[1].signs = ActivitySigns(idle_s=9.0)
        assert self.news(ranks, pages, 60.2) == [(Stalled, 0)]

    def test_who_is_in_one_itself_excuses_nobody(
        self, ranks: list[StallRank], pages: Clock
    ) -> None:
        ranks[1].signs = ranks[0].signs
        assert self.news(ranks, pages, 60.2) == [(Stalled, 0)]


def test_a_beat_says_how_many_collectives_a_rank_has_entered_and_when(
    tmp_path: Path, pages: Clock
) -> None:
    rank, limit = StallRank(tmp_path, 0, pages), Limit(60, "configured")
    rank.link.words[layout.STEPS] = rank.link.words[layout.STEP] = 1
    page, began_s = rank.view_of_page.read(), pages.now
    pages.now += 100
    standing = RankStanding(
        "running", None, 0.0, limit, collectives=17, collective_s=began_s + 98, collective="gloo"
    )
    beat = beat_of(0, page, standing, pages.now)
    assert (beat.collectives, beat.progress_age_s, beat.collective) == (17, 2.0, "gloo")
    unseen = beat_of(0, page, RankStanding("running", None, 0.0, limit), pages.now)
    assert (unseen.collectives, unseen.progress_age_s) == (None, 100.0)
    assert beat_of(0, page, None, pages.now).collectives is None


async def test_where_a_rank_stands_names_its_collective_until_it_moves(
    tmp_path: Path, pages: Clock
) -> None:
    node = WatchedNode(tmp_path, pages, LimitRules(), 1)
    (rank,) = node.ranks
    rank.link.up()
    rank.link.words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
    TestWhoIsMissing.step(rank, pages)
    node.wait(60)
    entered_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp() - 10  # by the node's wall clock
    recorded = trace(entry(0, entered_s, retired=False), g0=1)
    async with worker_server(tmp_path, {"fr_trace_json": lambda: recorded}):
        await node.watch._closer.look(node.watch._silent())
    node.wait(10)
    assert known(node) == "gloo:all_reduce of default_pg"
    TestWhoIsMissing.step(rank, pages)
    node.wait(10)
    assert known(node) is None


def known(node: WatchedNode) -> str | None:
    standing = node.watch.standing(0)
    assert standing is not None
    return standing.collective
