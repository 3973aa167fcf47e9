"""A live job: who is slow is named within three windows, cleared afterwards, and nobody else."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from everstep.messages import ShowHeatMap
from everstep_services.straggler.domain.changes import (
    Change,
    Cost,
    KeepsUp,
    SlowRankFound,
    StepsShifted,
)
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.jobs import Jobs
from everstep_services.straggler.judgements import JudgementRunner
from everstep_services.straggler.settings import StragglerSettings
from tests.fakes.clock import FakeClock
from tests.unit.straggler.windows import Delay, Simulation, Training, Where


def judged(
    plan: Training, windows: int, rules: LiveRules | None = None
) -> tuple[JobJudge, list[Change]]:
    print("seed", plan.seed)
    simulation, job = Simulation(plan), JobJudge(plan.job, rules or LiveRules())
    changes: list[Change] = []
    for number in range(windows):
        for timings in simulation.window():
            job.hear(timings, float(number))
        changes += job.close_due(float(number))
    return job, changes


def slow_ranks(changes: Sequence[Change]) -> list[int]:
    return [one.rank for one in changes if isinstance(one, SlowRankFound)]


PLANS = {
    "data parallel": Training(),
    "buckets": Training(buckets=3),
    "tensor parallel": Training(nodes=4, tensor=2),
    "stages": Training(nodes=4, stages=2, stage_work=(1, 1.3)),
    "unmodified": Training(has_sections=False),
}


async def test_windows_can_be_looked_at_after_the_end_of_their_job() -> None:
    judge, _ = judged(Training(), 3)
    question = ShowHeatMap(job=judge.job)
    before = judge.heat_map_part(question, 100)
    assert len(before.windows) > 0
    jobs, runner = (
        Jobs(StragglerSettings(), lambda _job, _rules: judge),
        JudgementRunner(FakeClock()),
    )
    tracked = jobs.track(judge.job, 0.0)
    assert tracked is not None
    judge.end("its job ended")
    tracked.work.retire(JobJudge(judge.job, LiveRules()), "its job ended")
    assert jobs.past(judge.job) is None, "it is still tracked"
    jobs.forget(judge.job)
    over = jobs.past(judge.job)
    assert over is tracked
    assert await runner.ask_of_past(over, lambda one: one.heat_map_part(question, 100)) == before
    for number in range(8):
        jobs.track(f"job-{number}", 0.0)
        jobs.forget(f"job-{number}")
    assert jobs.past(judge.job) is None, "the last eight are remembered"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("where", ["data", "backward"])
def test_the_slow_rank_is_named_within_three_windows(plan: Training, where: str) -> None:
    """30 ms in steps of 100 ms; clocks are off by half a second and drift (A6.1, A6.3)."""
    delay = Delay(5, 0.03, "data" if where == "data" else "backward")
    _, changes = judged(replace(plan, delays=(delay,), offset_s=0.5, drift=2e-4), 3)
    assert slow_ranks(changes) == [5]
    (found,) = changes
    assert isinstance(found, SlowRankFound)
    own = found.scores[0]
    assert own.value_s is not None
    assert own.reference_s is not None
    assert own.value_s - own.reference_s == pytest.approx(0.03, rel=0.15)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nobody_is_named_where_all_keep_up(plan: Training) -> None:
    """Forty windows of equal ranks (A6.2, A6.3)."""
    _, changes = judged(plan, 40)
    assert slow_ranks(changes) == []


HALVES = {
    "two of four": ((2, 2), [0, 3]),
    "three of four": ((1, 4), [0, 1, 3]),
    "a node of two": ((2, 4), [4, 5, 6, 7]),
    "a node of four": ((4, 2), [2, 3]),
}


@pytest.mark.parametrize(("shape", "slow"), HALVES.values(), ids=HALVES)
@pytest.mark.parametrize(("where", "cause"), [("data", "input"), ("host", "host")])
def test_half_of_the_ranks_that_become_slow_are_named_with_cause_and_price(
    shape: tuple[int, int], slow: list[int], where: Where, cause: str
) -> None:
    """30 ms from the eleventh window to the twentieth; the step has not shifted (A6.1)."""
    nodes, per_node = shape
    delays = tuple(Delay(rank, 0.03, where, first=161, last=320) for rank in slow)
    plan = Training(nodes=nodes, per_node=per_node, delays=delays)
    _, changes = judged(plan, 30)
    found = [one for one in changes if isinstance(one, SlowRankFound)]
    assert sorted(one.rank for one in found) == slow
    assert {one.cause for one in found} == {cause}
    assert max(one.last_step for one in found) <= 13 * 16
    own = [one.scores[0] for one in found]
    assert all(0.025 < (one.value_s or 0) - (one.reference_s or 0) < 0.035 for one in own)
    assert not any(isinstance(one, StepsShifted) for one in changes)
    cleared = [one for one in changes if isinstance(one, KeepsUp)]
    assert sorted(one.rank for one in cleared) == slow
    if len(slow) * 2 >= nodes * per_node:
        assert all("half of its role or more is slow" in one.reason for one in found)
    total = sum(lost_s(changes, rank) for rank in slow)
    assert total == pytest.approx(160 * 0.03, rel=0.2)


def test_all_ranks_that_become_slow_are_a_step_shift() -> None:
    delays = tuple(Delay(rank, 0.03, first=161) for rank in range(4))
    _, changes = judged(Training(nodes=1, delays=delays), 20)
    assert [type(one) for one in changes] == [StepsShifted]


def test_slow_from_the_start_is_told_by_the_other_ranks_only() -> None:
    """No rank has earlier times of its own: of half of the ranks nobody is named."""
    _, changes = judged(Training(nodes=1, delays=(Delay(2, 0.03),)), 4)
    assert slow_ranks(changes) == [2]
    _, changes = judged(Training(nodes=1, delays=(Delay(0, 0.03), Delay(2, 0.03))), 20)
    assert slow_ranks(changes) == []


@pytest.mark.parametrize(
    ("every", "is_found"), [(10, False), (5, False), (4, False), (2, True), (1, True)]
)
def test_a_rank_that_is_slow_in_less_than_a_quarter_of_the_steps_is_not_named(
    every: int, is_found: bool
) -> None:
    """As garbage collection is: the middle half of the steps counts, and has no part in it."""
    delays = tuple(Delay(5, 0.1, first=step, last=step) for step in range(1, 20 * 16, every))
    _, changes = judged(Training(delays=delays), 20)
    assert slow_ranks(changes) == ([5] if is_found else [])


def test_a_rank_that_keeps_up_again_is_cleared_once() -> None:
    """The delay ends with the sixth window (A6.2)."""
    _, changes = judged(Training(delays=(Delay(2, 0.03, last=6 * 16),)), 14)
    assert [type(one) for one in changes if not isinstance(one, Cost)] == [SlowRankFound, KeepsUp]
    assert [one.rank for one in changes if isinstance(one, KeepsUp)] == [2]


def lost_s(changes: Sequence[Change], rank: int) -> float:
    """As a document counts it."""
    found = next(one for one in changes if isinstance(one, SlowRankFound) and one.rank == rank)
    since = found.lost_s * (found.last_step - found.first_step + 1)
    return since + sum(one.lost_s for one in changes if isinstance(one, Cost) and one.rank == rank)


def test_what_a_slow_rank_cost_is_the_sum_of_its_windows() -> None:
    """30 ms a step in ten windows, then 60 ms in ten; nothing counts twice, or once it is over."""
    delays = (Delay(2, 0.03, last=320), Delay(2, 0.03, first=161, last=320))
    _, changes = judged(Training(delays=delays), 30)
    assert slow_ranks(changes) == [2]
    assert lost_s(changes, 2) == pytest.approx(160 * 0.03 + 160 * 0.06, rel=0.15)
    told = [(one.first_step, one.last_step) for one in changes if isinstance(one, Cost)]
    assert [first for first, _ in told] == [49, *(last + 1 for _, last in told[:-1])]
    assert told[0] == (49, 144), "six windows"


def test_what_two_slow_ranks_cost_together_is_shared_by_them() -> None:
    """A step is longer by the slower one only."""
    delays = (Delay(1, 0.03, last=320), Delay(6, 0.03, last=320))
    _, changes = judged(Training(delays=delays), 30)
    costs = [sum(one.lost_s for one in changes if isinstance(one, Cost) and one.rank == rank)
             for rank in (1, 6)]  # fmt: skip
    assert sum(costs) == pytest.approx(17 * 16 * 0.03, rel=0.15)
    assert costs[0] == pytest.approx(costs[1], rel=0.2)


def test_windows_in_which_recorders_were_spared_cost_as_the_last_one_that_was_compared() -> None:
    simulation, job = (
        Simulation(Training(delays=(Delay(5, 0.03, last=320),))),
        JobJudge("job", LiveRules()),
    )
    changes: list[Change] = []
    for number in range(24):
        changes += told(job, simulation, number, "recorder spared", [0, 1] if number % 2 else ())
    (found,) = (one for one in changes if isinstance(one, SlowRankFound))
    later = sum(one.lost_s for one in changes if isinstance(one, Cost))
    assert later == pytest.approx((320 - found.last_step) * 0.03, rel=0.15)


def test_while_recorders_are_spared_the_last_comparison_is_shown() -> None:
    """Agents read large recorders in every sixteenth window at least (A6.4)."""
    plan = Training(delays=(Delay(5, 0.03),))
    simulation, job = Simulation(plan), JobJudge(plan.job, LiveRules())

    def close(number: int, *, is_spared: bool) -> None:
        for timings in simulation.window():
            ranks = [replace_struct(one, collectives=()) for one in timings.ranks]
            given = replace_struct(timings, ranks=tuple(ranks)) if is_spared else timings
            job.hear(given, float(number))
        job.close_due(float(number))

    for number in range(4):
        close(number, is_spared=number == 3)
    table = job.scores(100, "")
    assert (table.window, table.ranks[0].rank, table.ranks_seen) == (48, 5, 8)
    assert table.slowdown_ratio == pytest.approx(0.3, rel=0.1)
    for number in range(4, 19):
        close(number, is_spared=True)
    assert job.scores(100, "").window == 19 * 16, "they are silent, and no longer spared"


def told(
    job: JobJudge, simulation: Simulation, number: int, gap: str = "", silent: Sequence[int] = ()
) -> list[Change]:
    """A window in which the recorders of these nodes do not tell, and why."""
    for timings in simulation.window():
        ranks = timings.ranks
        if timings.slot in silent:
            ranks = tuple(replace_struct(one, collectives=(), gap=gap) for one in ranks)
        job.hear(replace_struct(timings, ranks=ranks), float(number))
    return job.close_due(float(number))


@pytest.mark.parametrize("gap", ["recorder silent", "recorder spared", ""])
def test_why_the_own_times_of_a_node_are_unknown_is_said(gap: str) -> None:
    """Also where those of the other half are known."""
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    told(job, simulation, 0, gap, silent=[0])
    table = job.scores(8, "")
    assert {one.rank for one in table.ranks if one.own_s is None} == {0, 1, 2, 3}
    why = gap or "no collective was seen"
    assert table.said == f"4 ranks of node-0 cannot be compared: {why}"


def test_while_one_nodes_recorders_are_spared_the_last_comparison_is_shown() -> None:
    simulation, job = Simulation(Training()), JobJudge("job", LiveRules())
    told(job, simulation, 0)
    for number in range(1, 16):
        told(job, simulation, number, "recorder spared", silent=[0])
    assert (job.scores(8, "").ranks_seen, job.scores(8, "").window) == (8, 16)
    told(job, simulation, 16, "recorder spared", silent=[0])
    assert job.scores(8, "").ranks_seen == 4, "they are spared for too long"


@pytest.mark.parametrize("plan", [Training(nodes=4, per_node=2), Training(nodes=2, per_node=4)])
def test_a_node_that_is_heard_late_has_the_role_of_the_others(plan: Training) -> None:
    """Gloo's recorder does not say who is in a group: those who were seen in it count."""
    plan = replace(plan, has_members=False, delays=(Delay(0, 0.03),))
    simulation, job = Simulation(plan), JobJudge("job", LiveRules())
    told(job, simulation, 0, "recorder silent", silent=[0])
    for number in range(1, 5):
        told(job, simulation, number)
    table = job.scores(8, "")
    assert {one.role for one in table.ranks} == {"all ranks"}
    assert [one.rank for one in table.ranks if one.is_straggler] == [0]
