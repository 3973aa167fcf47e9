"""Nodes' windows as they come: missing, late, twice, absurd; refused and counted, never fatal."""

import base64
import math
import random
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from everstep.messages import (
    ClockOffset,
    CollectiveEntries,
    DeviceUse,
    HostUse,
    KernelTiming,
    KnownStraggler,
    NodeTimings,
    RankTiming,
    SectionTiming,
    ShowHeatMap,
    ShowTimings,
    Sketch,
)
from everstep_services.straggler.domain.changes import Change, KeepsUp, SlowRankFound
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.rules import LiveRules
from tests.unit.straggler.changes import without_costs
from tests.unit.straggler.windows import Delay, Simulation, Training

SLOW = Training(delays=(Delay(5, 0.03),))


def changed(timings: NodeTimings, **fields: object) -> NodeTimings:
    return msgspec.structs.replace(timings, **fields)


def names(changes: list[Change]) -> list[tuple[str, int]]:
    return [
        (type(one).__name__, one.rank)
        for one in changes
        if isinstance(one, SlowRankFound | KeepsUp)
    ]


def heard(job: JobJudge, windows: list[list[NodeTimings]]) -> list[Change]:
    changes: list[Change] = []
    for number, window in enumerate(windows):
        for timings in window:
            job.hear(timings, float(number))
        changes += without_costs(job.close_due(float(number)))
    return changes


def test_a_window_waits_for_its_nodes_and_no_longer_than_the_grace() -> None:
    job = JobJudge("job", LiveRules(grace_s=5.0))
    first, second = Simulation(Training()).window()
    job.hear(first, 10.0)
    assert job.close_due(14.9) == []
    assert job.scores(1, "").window == 0
    job.close_due(15.0)
    table = job.scores(8, "")
    assert (table.window, table.ranks_missing, len(table.ranks)) == (16, 4, 4)
    job.hear(second, 15.1)
    assert job.refused["late window"] == 1


def test_a_complete_window_closes_those_before_it() -> None:
    """Nodes send in order: what is missing of an earlier window is lost."""
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    early, late = simulation.window(), simulation.window()
    job.hear(early[0], 0.0)
    for timings in late:
        job.hear(timings, 0.1)
    job.close_due(0.2)
    table = job.timings(ShowTimings(job="job"))
    assert table.windows == ((1, 16), (17, 32))
    assert [one is None for one in table.rows[7].values] == [True, False]


def test_a_heat_map_is_the_table_in_two_bytes_a_cell() -> None:
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    early, late = simulation.window(), simulation.window()
    for timings in (early[0], *late):
        job.hear(timings, 0.1)
    job.close_due(0.2)
    table = job.timings(ShowTimings(job="job", first_rank=1))
    part = job.heat_map_part(ShowHeatMap(job="job", first_rank=1), 100)
    cells = np.frombuffer(base64.b64decode(part.cells), "<u2").reshape(-1, 2).tolist()
    assert (part.windows, part.first_rank, part.next_rank) == (table.windows, 1, None)
    for row, shown in zip(table.rows, cells, strict=True):
        for value, cell in zip(row.values, shown, strict=True):
            if value is None:
                assert cell == 0
            else:
                back = part.low + (cell - 1) * (part.high - part.low) / 65_534
                assert back == pytest.approx(value, abs=1e-6)
    names = [run.node for run in part.nodes for _ in range(run.ranks)]
    assert names == [row.node for row in table.rows]
    first = job.heat_map_part(ShowHeatMap(job="job", first_rank=1), 2)
    assert (sum(run.ranks for run in first.nodes), first.next_rank) == (2, 3)


def test_what_comes_twice_or_from_an_older_round_is_refused_and_counted() -> None:
    simulation, job = Simulation(replace(SLOW, round=2)), JobJudge("job", LiveRules())
    first, second = simulation.window()
    job.hear(first, 0.0)
    job.hear(first, 0.0)
    job.hear(changed(second, round=1), 0.0)
    job.hear(changed(second, world=9), 0.0)
    job.hear(changed(second, job="other"), 0.0)
    job.hear(changed(second, slot=2), 0.0)
    job.hear(changed(second, first_step=17), 0.0)
    assert dict(job.refused) == {
        "duplicate window": 1, "stale round": 1, "another world": 1, "another job": 1,
        "absurd round": 1, "absurd steps": 1,
    }  # fmt: skip


def test_a_new_round_ends_the_findings_of_the_one_before() -> None:
    """Two rounds are never mixed."""
    job, simulation = JobJudge("job", LiveRules()), Simulation(SLOW)
    assert names(heard(job, [simulation.window() for _ in range(3)])) == [("SlowRankFound", 5)]
    old = simulation.window()
    job.hear(Simulation(Training(round=2)).window()[0], 9.0)
    job.hear(old[0], 9.0)
    (gone,) = job.close_due(9.0)
    assert gone == KeepsUp(1, 5, "round 2 began")
    assert (job.round, job.refused["stale round"]) == (2, 1)


def test_the_end_of_a_job_clears_who_was_slow() -> None:
    job, simulation = JobJudge("job", LiveRules()), Simulation(SLOW)
    heard(job, [simulation.window() for _ in range(3)])
    assert job.end("the job succeeded") == [KeepsUp(1, 5, "the job succeeded")]
    job.hear(simulation.window()[0], 9.0)
    assert (job.round, job.close_due(9.0), job.end("again")) == (None, [], [])


def known(rank: int, round_number: int = 1) -> KnownStraggler:
    return KnownStraggler(
        finding="f" * 32, round=round_number, rank=rank, node="node-1", slot=1,
        found_at=datetime(2026, 1, 1, tzinfo=UTC), cause="input", reason="slow",
    )  # fmt: skip


@pytest.mark.parametrize("is_early", [True, False])
def test_adopted_findings_are_not_made_again_and_are_cleared(is_early: bool) -> None:
    """A replica that was started again knows them by the document."""
    job = JobJudge("job", LiveRules())
    simulation = Simulation(Training(delays=(Delay(5, 0.03, last=4 * 16),)))
    if is_early:
        job.adopt([known(5)])
        changes = heard(job, [simulation.window() for _ in range(4)])
    else:
        changes = heard(job, [simulation.window()])
        job.adopt([known(5), known(5), known(6, 7)])
        changes += heard(job, [simulation.window() for _ in range(3)])
    assert names(changes) == []
    assert job.scores(1, "").ranks[0].is_straggler
    changes = heard(job, [simulation.window() for _ in range(4)])
    assert names(changes) == [("KeepsUp", 5)]


def test_findings_of_an_older_round_are_over() -> None:
    job = JobJudge("job", LiveRules())
    job.adopt([known(3, 1)])
    job.hear(Simulation(Training(round=2)).window()[0], 0.0)
    assert names(job.close_due(0.0)) == [("KeepsUp", 3)]


@pytest.mark.parametrize("seed", range(3))
def test_lost_messages_hide_nobody_and_accuse_nobody(seed: int) -> None:
    """A tenth of the messages is lost (A6.1, A6.2)."""
    print("seed", seed)
    plan = Training(seed=seed, nodes=8, per_node=2, delays=(Delay(5, 0.03, first=20 * 16 + 1),))
    simulation, draw = Simulation(plan), random.Random(seed)
    job = JobJudge("job", LiveRules())
    changes: list[tuple[int, Change]] = []
    for number in range(32):
        for timings in simulation.window():
            if draw.random() < 0.9:
                job.hear(timings, number * 10.0)
        changes += [(number, one) for one in without_costs(job.close_due(number * 10.0 + 9))]
    assert [(type(one), getattr(one, "rank", None)) for _, one in changes] == [(SlowRankFound, 5)]
    assert changes[0][0] < 20 + 8


def test_a_node_that_uses_shorter_windows_for_a_while_is_still_compared() -> None:
    """Its windows that end with the same step belong to the others'."""
    simulation, job = Simulation(SLOW), JobJudge("job", LiveRules())
    changes: list[Change] = []
    for number in range(4):
        half = simulation.window(8)
        whole = simulation.window(8)
        job.hear(half[0], number * 10.0)
        job.hear(whole[0], number * 10.0)
        job.hear(changed(whole[1], first_step=whole[1].first_step - 8), number * 10.0)
        changes += without_costs(job.close_due(number * 10.0))
    assert names(changes) == [("SlowRankFound", 5)]


def test_ranks_come_and_go() -> None:
    """A rank that sends nothing any more stays as it was; it is a gap."""
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    for number in range(12):
        for timings in simulation.window():
            kept = tuple(one for one in timings.ranks if one.rank != 3 or number % 2)
            job.hear(changed(timings, ranks=kept), float(number))
        assert job.close_due(float(number)) == []
    rows = job.timings(ShowTimings(job="job", first_rank=3, most_ranks=1)).rows
    assert [one is None for one in rows[0].values] == [True, False] * 6


def test_with_fewer_than_three_ranks_nobody_is_judged_and_that_is_said() -> None:
    job = JobJudge("job", LiveRules())
    plan = Training(nodes=2, per_node=1, delays=(Delay(1, 0.1),))
    simulation = Simulation(plan)
    assert heard(job, [simulation.window() for _ in range(6)]) == []
    assert "fewer than 3 ranks" in job.scores(2, "").said


def test_without_a_recorder_sections_are_compared_by_their_processor_time() -> None:
    """If all ranks of a role have it."""
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    changes: list[Change] = []
    for number in range(4):
        for timings in simulation.window():
            ranks = tuple(
                msgspec.structs.replace(
                    one, collectives=(), gap="recorder silent",
                    sections=(SectionTiming(section="", wall=one.sections[0].wall, cpu=Sketch(
                        count=16, sum_s=1.6 + (one.rank == 2), min_s=0.1, max_s=0.2,
                        buckets=((-26, 16),))),),
                )
                for one in timings.ranks
            )  # fmt: skip
            job.hear(changed(timings, ranks=ranks), float(number))
        changes += without_costs(job.close_due(float(number)))
    assert names(changes) == [("SlowRankFound", 2)]


def test_where_nothing_can_be_compared_the_reason_is_said() -> None:
    job = JobJudge("job", LiveRules())
    window = [
        changed(one, ranks=tuple(
            msgspec.structs.replace(rank, collectives=(), sections=(), gap="recorder silent")
            for rank in one.ranks
        ))
        for one in Simulation(SLOW).window()
    ]  # fmt: skip
    heard(job, [window])
    assert "recorder silent" in job.scores(3, "").said


def test_the_steps_of_a_window_follow_the_step_and_do_not_flap() -> None:
    job = JobJudge("job", LiveRules())
    assert job.window_steps(10.0) is None
    simulation = Simulation(Training(jitter=0.3))
    seen = set()
    for number in range(10):
        heard(job, [simulation.window()])
        seen.add(job.window_steps(14.0 + (number % 3) * 2))
    assert seen == {128}
    assert job.window_steps(0.001) == 1
    assert job.window_steps(1e12) == 1 << 20


_FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300, 1.7e9, 0.1, -1e18)
_INTS = (0, 1, -1, 2**53, -(2**63), 2**63 - 1, 63, 10**15)


def absurd(draw: random.Random, timings: NodeTimings) -> NodeTimings:
    """A message of a sick node: any field may hold anything that its type allows."""

    def real() -> float:
        return draw.choice(_FLOATS)

    def whole() -> int:
        return draw.choice(_INTS)

    def size() -> int:
        return abs(whole())

    def sketch() -> Sketch:
        buckets = tuple((whole(), whole()) for _ in range(draw.randint(0, 3)))
        return Sketch(count=whole(), sum_s=real(), min_s=real(), max_s=real(), buckets=buckets)

    def entries() -> CollectiveEntries:
        many = draw.randint(0, 70)
        times = tuple(whole() for _ in range(many)) if draw.random() < 0.5 else tuple(range(many))
        return CollectiveEntries(
            group=draw.choice(["0", "", "x" * 500]), first_sequence=whole(), entered_us=times,
            ops=("a", "b"), op=tuple(whole() for _ in range(draw.choice([0, many]))),
            section=tuple(whole() for _ in range(draw.choice([0, many]))),
            lasted_us=tuple(whole() for _ in range(draw.choice([0, many]))),
            members=tuple(size() for _ in range(draw.randint(0, 90))),
        )  # fmt: skip

    def rank(number: int) -> RankTiming:
        return RankTiming(
            rank=draw.choice([number, size()]), steps=size(), window_s=real(), role="r",
            sections=tuple(
                SectionTiming(section=f"s{draw.randint(0, 99)}", wall=sketch(), cpu=sketch(),
                              device=sketch())
                for _ in range(draw.randint(0, 70))
            ),
            entries_from_s=real(), collectives=tuple(entries() for _ in range(draw.randint(0, 4))),
            host=HostUse(main_cpu_s=real(), runnable_s=real(), retransmits=whole()),
            device=DeviceUse(clock_mhz=whole(), throttled_by=("x",)),
            kernels=(KernelTiming(kernel="k", count=size(), median_s=real(), average_s=real()),),
        )  # fmt: skip

    return changed(
        timings, window_s=real(), host_steal_s=real(), first_step=draw.choice([1, size()]),
        last_step=draw.choice([timings.last_step, size()]), slot=draw.choice([1, size()]),
        clocks=tuple(ClockOffset(clock="c", offset_s=real(), error_s=real()) for _ in range(3)),
        ranks=tuple(rank(number) for number in range(draw.randint(0, 6))),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_a_sick_node_is_refused_and_harms_no_verdict(seed: int) -> None:
    """Numbers that are negative, absurd, or none, in any field; the slow rank is named (A6.1)."""
    print("seed", seed)
    draw = random.Random(seed)
    simulation, job = (
        Simulation(Training(nodes=4, delays=(Delay(9, 0.03),))),
        JobJudge("job", LiveRules()),
    )
    changes: list[Change] = []
    with np.errstate(all="raise", under="ignore"):
        for number in range(12):
            for timings in simulation.window():
                is_sick = timings.slot == 1
                job.hear(absurd(draw, timings) if is_sick else timings, number * 10.0)
            changes += without_costs(job.close_due(number * 10.0 + 6))
            job.scores(100, "")
            job.timings(ShowTimings(job="job", measure="section", section="s1"))
            assert all(math.isfinite(one) for one in job.summary().values())
    assert ("SlowRankFound", 9) in names(changes)
    assert sum(job.refused.values()) > 0
