"""Why a rank is slow, what it costs, and when it is the whole job instead of a rank."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from everstep.messages import DeviceUse, KernelTiming, NodeTimings, RankTiming, ShowTimings
from everstep_services.straggler.domain import scores
from everstep_services.straggler.domain.changes import Change, SlowRankFound, StepsShifted
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.live.causes import blame, interval
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.domain.verdict import (
    Found,
    SlownessLimits,
    VerdictState,
    Window,
    observe,
)
from tests.unit.straggler.changes import without_costs
from tests.unit.straggler.windows import Delay, Simulation, Training, Where, healthy

Alter = Callable[[RankTiming], RankTiming]


def run(
    simulation: Simulation, job: JobJudge, windows: int, alter: Alter | None = None
) -> list[Change]:
    print("seed", simulation.plan.seed)
    changes: list[Change] = []
    for number in range(windows):
        for timings in simulation.window():
            ranks = timings.ranks if alter is None else tuple(alter(one) for one in timings.ranks)
            job.hear(msgspec.structs.replace(timings, ranks=ranks), float(number))
        changes += without_costs(job.close_due(float(number)))
    return changes


CAUSES: dict[tuple[Where, bool], tuple[str, str | None]] = {
    ("data", True): ("input", "data"),
    ("data", False): ("unknown", None),
    ("forward", True): ("compute", "forward"),
    ("forward", False): ("compute", None),
    ("backward", True): ("compute", "backward"),
    ("backward", False): ("compute", None),
    ("host", True): ("host", None),
    ("host", False): ("host", None),
    ("link", True): ("network", None),
    ("link", False): ("network", None),
}


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize(("where", "has_sections"), CAUSES)
def test_the_cause_is_named_with_the_rank(where: Where, has_sections: bool, buckets: int) -> None:
    """30 ms in steps of 100 ms; of an unmodified script the host tells what it can (A6.1)."""
    plan = Training(
        delays=(Delay(6, 0.03, where),), has_sections=has_sections, buckets=buckets, offset_s=0.2
    )
    (found,) = run(Simulation(plan), JobJudge("job", LiveRules()), 3)
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.node, found.slot) == (6, "node-1", 1)
    assert (found.cause, found.section) == CAUSES[where, has_sections]
    assert " ms above the median of 7 others" in found.reason
    assert 0.2 < found.confidence <= 1


def test_a_slow_link_in_a_ring_is_that_of_the_sender() -> None:
    """The rank before it leaves collectives late; real gloo does so (A6.1)."""
    plan = Training(delays=(Delay(4, 0.03, "ring", last=4 * 16),), has_sections=False)
    found = run(Simulation(plan), JobJudge("job", LiveRules()), 12)
    assert [(type(one).__name__, getattr(one, "rank", None)) for one in found] == [
        ("SlowRankFound", 4), ("KeepsUp", 4),
    ]  # fmt: skip
    slow = found[0]
    assert isinstance(slow, SlowRankFound)
    assert (slow.cause, slow.node) == ("network", "node-1")
    assert "rank 3, which it sends to in a ring" in slow.reason


def test_all_ranks_of_a_node_whose_processors_are_stolen_are_named() -> None:
    """One of four nodes (A6.1)."""
    plan = Training(nodes=4, delays=tuple(Delay(rank, 0.03, "host") for rank in range(4, 8)))
    found = run(Simulation(plan), JobJudge("job", LiveRules()), 3)
    assert {(one.rank, one.cause) for one in found if isinstance(one, SlowRankFound)} == {
        (rank, "host") for rank in range(4, 8)
    }


@pytest.mark.parametrize("has_sections", [True, False])
@pytest.mark.parametrize("signal", ["memory pressure", "major faults"])
def test_a_node_that_runs_out_of_memory_is_a_host(signal: str, has_sections: bool) -> None:
    """Its ranks wait until pages are back: the kernel tells how long, or only how often."""
    delays = tuple(Delay(rank, 0.03, "sleep") for rank in (4, 5, 6, 7))
    plan = Training(nodes=4, delays=delays, has_sections=has_sections)

    def alter(one: RankTiming) -> RankTiming:
        assert one.host is not None
        is_slow = one.rank in (4, 5, 6, 7)
        if signal == "memory pressure":
            host = msgspec.structs.replace(
                one.host, memory_pressure_s=one.steps * (0.025 if is_slow else 0.0002)
            )
        else:
            host = msgspec.structs.replace(one.host, major_faults=one.steps * 40 * is_slow + 2)
        return msgspec.structs.replace(one, host=host)

    found = run(Simulation(plan), JobJudge("job", LiveRules()), 3, alter)
    assert {(one.rank, one.cause) for one in found if isinstance(one, SlowRankFound)} == {
        (rank, "host") for rank in (4, 5, 6, 7)
    }
    words = "waited for memory" if signal == "memory pressure" else "40.1 major page faults a step"
    assert all(words in one.reason for one in found if isinstance(one, SlowRankFound))


def test_pages_that_are_read_in_the_data_section_are_input() -> None:
    """A dataset that is mapped into memory is read by page faults."""
    plan = Training(delays=(Delay(6, 0.03, "data"),))

    def alter(one: RankTiming) -> RankTiming:
        assert one.host is not None
        host = msgspec.structs.replace(one.host, major_faults=one.steps * 40 * (one.rank == 6))
        return msgspec.structs.replace(one, host=host)

    (found,) = run(Simulation(plan), JobJudge("job", LiveRules()), 3, alter)
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause) == (6, "input")


def test_a_throttled_device_is_named() -> None:
    plan = Training(delays=(Delay(1, 0.03, "sleep"),), has_sections=False)

    def alter(one: RankTiming) -> RankTiming:
        is_slow = one.rank == 1
        device = DeviceUse(
            clock_mhz=1100 if is_slow else 1980, clock_most_mhz=1980,
            throttled_by=("sw_power_cap", "hw_slowdown") if is_slow else ("sw_power_cap",),
        )  # fmt: skip
        return msgspec.structs.replace(one, device=device)

    (found,) = run(Simulation(plan), JobJudge("job", LiveRules()), 3, alter)
    assert isinstance(found, SlowRankFound)
    assert found.cause == "device"
    assert "throttled by hw_slowdown at 1100 MHz against 1980" in found.reason


@pytest.mark.parametrize("how", ["groups", "names", "declared"])
def test_stages_that_have_more_to_do_are_not_slow(how: str) -> None:
    """Only ranks of one role are compared (A6.3)."""
    roles = tuple(f"stage {rank // 8}" for rank in range(16)) if how == "declared" else ()
    plan = Training(nodes=4, stages=2, stage_work=(1, 1.5), roles=roles,
                    has_members=how != "names", delays=(Delay(12, 0.03),))  # fmt: skip
    job = JobJudge("job", LiveRules())
    found = run(Simulation(plan), job, 6)
    slow = [one for one in found if isinstance(one, SlowRankFound) and not one.is_design]
    assert [one.rank for one in slow] == [12]
    table = job.scores(16, "stage 1") if roles else job.scores(16, "like rank 8")
    assert table.ranks[0].rank == 12
    assert len(table.ranks) == 8


def test_nobody_is_named_in_a_thousand_noisy_windows() -> None:
    """64 ranks with 5 % of noise in each window (A6.2)."""
    random, state, found = np.random.default_rng(11), VerdictState(), []
    subjects, role = np.arange(64), np.zeros(64, dtype=np.int64)
    for number in range(1000):
        window = Window(number, subjects, random.normal(1, 0.05, 64), role)
        state, changes = observe(state, window, SlownessLimits())
        found += list(changes)
    assert found == []


@pytest.mark.parametrize("seed", range(2))
def test_garbage_collections_and_checkpoints_accuse_nobody(seed: int) -> None:
    """Half a step in one of fifty steps of each rank, a checkpoint in each twentieth (A6.2)."""
    plan = Training(seed=seed, jitter=0.05, collected=0.02, checkpoint_every=20, nodes=4)
    assert run(Simulation(plan), JobJudge("job", LiveRules()), 40) == []


def test_an_excess_that_clocks_may_explain_is_none() -> None:
    """Clocks are known to 5 ms only: what a node has in common is cut by that."""
    plan = Training(nodes=8, per_node=1, read_error_s=0.005, offset_s=0.5)
    assert run(Simulation(plan), JobJudge("job", LiveRules()), 20) == []
    plan = replace(plan, delays=(Delay(3, 0.03),))
    (found,) = run(Simulation(plan), JobJudge("job", LiveRules()), 4)
    assert isinstance(found, SlowRankFound)
    assert found.rank == 3


def test_clocks_that_nobody_has_read_are_aligned_by_the_collectives() -> None:
    plan = Training(nodes=4, are_clocks_read=False, offset_s=100.0, delays=(Delay(5, 0.03),))
    (found,) = run(Simulation(plan), JobJudge("job", LiveRules()), 3)
    assert isinstance(found, SlowRankFound)
    assert found.rank == 5


def test_a_clock_that_is_set_accuses_nobody() -> None:
    """By 20 s, after it was read."""
    simulation, job = Simulation(Training(nodes=4)), JobJudge("job", LiveRules())
    assert run(simulation, job, 4) == []
    messages = simulation.window()
    late = messages[1]
    ranks = tuple(
        msgspec.structs.replace(one, entries_from_s=one.entries_from_s + 20) for one in late.ranks
    )
    messages[1] = msgspec.structs.replace(late, ranks=ranks)
    for timings in messages:
        job.hear(timings, 9.0)
    assert job.close_due(9.0) == []
    assert job.refused["clock that was set"] == 1
    assert run(simulation, job, 4) == []


def priced(seed: int) -> float:
    """The error of a price against the truth of the simulator."""
    random = np.random.default_rng(seed)
    where: Where = random.choice(["data", "forward", "backward"])
    plan = Training(
        seed=seed, nodes=4, buckets=int(random.integers(1, 4)),
        tensor=int(random.integers(1, 3)), jitter=float(random.choice([0.02, 0.05])),
    )  # fmt: skip
    delay = Delay(int(random.integers(16)), float(random.uniform(0.02, 0.1)), where)
    plan = replace(plan, delays=(delay,))
    simulation, other = Simulation(plan), Simulation(healthy(plan))
    changes = run(simulation, JobJudge("job", LiveRules()), 3)
    other.run(48)
    truth = (simulation.now.max() - simulation.begun) / (other.now.max() - other.begun)
    (found,) = changes
    assert isinstance(found, SlowRankFound)
    assert found.slowdown_ratio is not None
    return float(abs((1 + found.slowdown_ratio) / truth - 1))


def test_prices_are_near_the_truth() -> None:
    """Within 3 % in the median, within 8 % for nine of ten (A6.1)."""
    errors = [priced(seed) for seed in range(100, 116)]
    print(errors)
    assert np.median(errors) <= 0.03
    assert np.percentile(errors, 90) <= 0.08


def test_a_whole_job_that_becomes_slower_is_a_shift_with_its_section() -> None:
    """No rank stands out; said once, and once more when it is over."""
    simulation, job = Simulation(Training(jitter=0.03)), JobJudge("job", LiveRules())
    assert run(simulation, job, 10) == []
    simulation.plan = replace(simulation.plan, stage_work=(1.3,))
    changes = run(simulation, job, 10)
    (shift,) = changes
    assert isinstance(shift, StepsShifted)
    assert (shift.step, shift.section) == (161, "backward")
    assert shift.before_s == pytest.approx(0.104, rel=0.05)
    assert shift.now_s == pytest.approx(0.128, rel=0.05)
    assert "no rank stands out" in shift.reason
    simulation.plan = replace(simulation.plan, stage_work=(1.0,))
    (back,) = run(simulation, job, 10)
    assert isinstance(back, StepsShifted)
    assert back.now_s < back.before_s


def test_a_slow_rank_is_no_shift_of_the_whole_job() -> None:
    plan = Training(delays=(Delay(2, 0.05, first=161, last=320),))
    changes = run(Simulation(plan), JobJudge("job", LiveRules()), 30)
    assert [type(one).__name__ for one in changes] == ["SlowRankFound", "KeepsUp"]


def medians(timings: NodeTimings, section: int) -> list[float]:
    return [one.sections[section].wall.quantile_s(0.5) for one in timings.ranks]


def test_scores_of_sections_are_those_of_nvrx() -> None:
    """Relative to the fastest rank, and to the rank's own best, by its formulas."""
    simulation, job = Simulation(Training(nodes=1, jitter=0.2)), JobJudge("job", LiveRules())
    best = np.full((4, 1), np.nan)
    for number in range(3):
        (timings,) = simulation.window()
        job.hear(timings, float(number))
        job.close_due(float(number))
        now = np.array([medians(timings, 2)]).T
        individual, best = scores.individual_section_scores(now, best)
        relative = scores.relative_section_scores(now)
        for one in job.scores(4, "").ranks:
            score = next(kind for kind in one.scores if kind.signal == "section:forward")
            assert score.relative_score == pytest.approx(relative[one.rank, 0])
            assert score.individual_score == pytest.approx(individual[one.rank, 0], rel=1e-5)


def test_scores_of_kernels_are_those_of_nvrx() -> None:
    """Weighted by the time that they take; NCCL's do not count."""
    simulation, job = Simulation(Training(nodes=1)), JobJudge("job", LiveRules())

    def alter(one: RankTiming) -> RankTiming:
        slow = 2.0 if one.rank == 3 else 1.0
        kernels = (
            KernelTiming(kernel="gemm", count=10, median_s=0.01 * slow, average_s=0.01 * slow),
            KernelTiming(kernel="add", count=10, median_s=0.001, average_s=0.001),
            KernelTiming(kernel="ncclDevKernel", count=10, median_s=0.1, average_s=0.1 / slow),
        )
        return msgspec.structs.replace(one, kernels=kernels)

    run(simulation, job, 2, alter)
    found = {one.rank: one.scores for one in job.scores(4, "").ranks}
    gpu = {rank: next(one for one in mine if one.signal == "gpu") for rank, mine in found.items()}
    assert gpu[0].relative_score == pytest.approx(1.0)
    assert gpu[3].relative_score == pytest.approx((0.5 * 0.2 + 0.01) / 0.21)
    assert gpu[3].individual_score == pytest.approx(1.0)


def test_timings_are_ranks_by_windows_and_pages() -> None:
    simulation, job = Simulation(Training(delays=(Delay(5, 0.03),))), JobJudge("job", LiveRules())
    run(simulation, job, 3)
    table = job.timings(ShowTimings(job="job", most_ranks=6, most_windows=2))
    assert table.windows == ((17, 32), (33, 48))
    assert ([one.rank for one in table.rows], table.next_rank) == (list(range(6)), 6)
    rest = job.timings(ShowTimings(job="job", measure="ratio", first_rank=6))
    assert ([one.rank for one in rest.rows], rest.next_rank) == ([6, 7], None)
    data = job.timings(ShowTimings(job="job", measure="section", section="data", first_rank=5))
    assert data.rows[0].values == pytest.approx([0.04] * 3, rel=0.1)
    waited = job.timings(ShowTimings(job="job", measure="waited")).rows
    assert waited[5].values == pytest.approx([0.0] * 3, abs=1e-3)
    assert waited[0].values == pytest.approx([0.03] * 3, rel=0.1)


def test_gauges_and_the_table_agree() -> None:
    simulation, job = Simulation(Training(delays=(Delay(5, 0.03),))), JobJudge("job", LiveRules())
    assert job.summary() == {}
    run(simulation, job, 3)
    table, gauges = job.scores(1, ""), job.summary()
    assert (table.ranks[0].rank, table.ranks[0].is_straggler) == (5, True)
    assert gauges["own_seconds_max"] == table.ranks[0].own_s
    spreads = {spread.name: spread.values for spread in job.scores(0, "").spreads}
    ranks = job.scores(8, "").ranks
    assert spreads["own_s"][2] == table.ranks[0].own_s
    own = (one for rank in ranks for one in rank.scores if one.signal == "own")
    scores = [one.relative_score or 0.0 for one in own]
    assert spreads["score/own"][::2] == pytest.approx((min(scores), max(scores)))
    assert spreads["section/data_s"] == pytest.approx((0.01, 0.01, 0.04), rel=0.1)
    assert (gauges["slow_ranks"], gauges["windows"], gauges["missing_ranks"]) == (1, 3, 0)
    assert table.slowdown_ratio == pytest.approx(0.29, abs=0.02)
    (group,) = table.groups
    assert (group.last_rank, group.last_ratio, group.ranks) == (5, 1.0, 8)
    assert group.waited_s == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("where", ["host", "sleep"])
def test_a_rank_that_is_too_starved_to_answer_is_named(where: Where) -> None:
    """Others wait for it, and its recorder is silent from then on (A6.1)."""
    plan = Training(delays=(Delay(6, 0.08, where, first=65),), has_sections=False, jitter=0.03)
    simulation, job = Simulation(plan), JobJudge("job", LiveRules())
    assert run(simulation, job, 4) == []
    (found,) = run(simulation, job, 4, silent(6))
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause) == (6, {"host": "host", "sleep": "unknown"}[where])
    assert "its recorder did not answer" in found.reason
    assert found.lost_s == pytest.approx(0.08, rel=0.15)
    assert found.slowdown_ratio == pytest.approx(0.8, abs=0.1)
    assert [type(one).__name__ for one in run(simulation, job, 4, silent(6))] == []
    simulation.plan = healthy(plan)
    (over,) = run(simulation, job, 6)
    assert type(over).__name__ == "KeepsUp"


def test_a_silent_recorder_alone_accuses_nobody() -> None:
    """Nobody waits for its rank (A6.2)."""
    simulation, job = Simulation(Training(jitter=0.03)), JobJudge("job", LiveRules())
    assert run(simulation, job, 4) == []
    assert run(simulation, job, 20, silent(6)) == []


def test_ranks_that_never_answered_accuse_nobody() -> None:
    """What they needed before is not known."""
    plan = Training(delays=(Delay(6, 0.08, "sleep"),), has_sections=False)
    assert run(Simulation(plan), JobJudge("job", LiveRules()), 6, silent(6)) == []


def silent(rank: int) -> Alter:
    def alter(one: RankTiming) -> RankTiming:
        if one.rank != rank:
            return one
        return msgspec.structs.replace(one, collectives=(), gap="recorder silent")

    return alter


def test_a_rank_that_sleeps_is_named_and_not_its_neighbour() -> None:
    """On the border of a node and amid it (A6.1)."""
    for rank in (5, 4):
        plan = Training(delays=(Delay(rank, 0.15, "sleep"),), has_sections=False)
        found = run(Simulation(plan), JobJudge("job", LiveRules()), 4)
        assert {one.rank for one in found if isinstance(one, SlowRankFound)} == {rank}


@pytest.mark.parametrize(
    ("after", "text"),
    [
        ("all_gather 12", "all_reduce 8449 and all_gather 12"),
        ("all_reduce 8449", "one all_reduce 8449 and the next"),
    ],
)
def test_an_operation_and_the_next_of_its_name_are_told_apart(after: str, text: str) -> None:
    assert interval("all_reduce 8449", after) == text


def test_a_window_that_does_not_show_the_excess_names_no_cause() -> None:
    """A rank that was slow over a day, and is not in the latest window, has waited for nothing
    more than others there (A6.2)."""
    job, simulation = JobJudge("job", LiveRules()), Simulation(Training())
    assert run(simulation, job, 3) == []
    assert job._round is not None
    measured = job._round.newest
    assert measured is not None
    row = int(np.argsort(measured.own_s)[2])
    found = Found(subject=row, role=0, ratio=0.06, noise_ratio=0.01, since=1, window=24, windows=24)
    why = blame(measured, row, found, LiveRules().limits, np.ones(len(measured.own_s), dtype=bool))
    assert (why.cause, why.section) == ("unknown", None)
    assert "the latest window does not show why" in why.reason
    assert why.lost_s == pytest.approx(0.06 * np.median(measured.own_s), rel=0.1)
