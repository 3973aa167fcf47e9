"""A role that has more to do than others: found by design, and no rank of it is to blame."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from everstep.ids import id_from
from everstep.messages import KnownStraggler, StragglerCleared, StragglerFound
from everstep_services.straggler.domain.changes import Change, KeepsUp, SlowRankFound
from everstep_services.straggler.domain.findings import FindingContext, blank, revised
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.policy import Policy
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.domain.switches import StragglerSwitches
from tests.unit.straggler.changes import without_costs
from tests.unit.straggler.device_windows import DeviceSimulation
from tests.unit.straggler.test_findings import NOW
from tests.unit.straggler.windows import Delay, Training

UNEVEN = Training(nodes=2, stages=2, stage_work=(1, 1.5))
PIPELINE = Training(nodes=4, stages=4, stage_work=(1, 1, 1, 1.6))


def judged(simulation: DeviceSimulation, job: JobJudge, windows: int) -> list[Change]:
    print("seed", simulation.plan.seed)
    changes: list[Change] = []
    for number in range(windows):
        for timings in simulation.window():
            job.hear(timings, float(number))
        changes += without_costs(job.close_due(float(number)))
    return changes


def pipeline(plan: Training) -> DeviceSimulation:
    return DeviceSimulation(plan, microbatches=8)


def uneven(changes: Sequence[Change]) -> list[SlowRankFound]:
    return [one for one in changes if isinstance(one, SlowRankFound) and one.is_design]


def test_a_stage_with_more_to_do_is_named_once_and_none_of_its_ranks() -> None:
    """A6.3."""
    changes = judged(pipeline(UNEVEN), JobJudge("job", LiveRules()), 20)
    (change,) = changes
    assert isinstance(change, SlowRankFound)
    found = change
    assert found.is_design
    assert (found.role, found.rank, found.node) == ("stage 1", 4, "node-1")
    assert "all 4 ranks of role stage 1 need 14" in found.reason
    assert "rank 4 stands for its role" in found.reason
    (score,) = found.scores
    assert score.value_s is not None
    assert score.reference_s is not None
    assert score.value_s == pytest.approx(0.150, rel=0.01)
    assert score.reference_s == pytest.approx(0.130, rel=0.01)
    assert found.slower_ratio == pytest.approx(score.value_s / score.reference_s - 1)
    assert found.lost_s == pytest.approx(score.value_s - score.reference_s)
    assert found.section is None


def test_a_slow_rank_of_such_a_stage_is_found_besides() -> None:
    """Also the one that stands for it (A6.1, A6.3)."""
    for rank in (6, 4):
        plan = replace(UNEVEN, delays=(Delay(rank, 0.04),))
        changes = judged(pipeline(plan), JobJudge("job", LiveRules()), 8)
        found = [one for one in changes if isinstance(one, SlowRankFound) and not one.is_design]
        assert [one.rank for one in found] == [rank]
        assert [one.rank for one in uneven(changes)] == [4]
        document = revised(blank("job"), changes, FindingContext(NOW, 1, id_from)).document
        causes = {(one.rank, one.cause) for one in document.found}
        assert causes == {(rank, "unknown"), (4, "design")}


def test_stages_that_are_even_again_are_cleared() -> None:
    simulation, job = pipeline(UNEVEN), JobJudge("job", LiveRules())
    (found,) = judged(simulation, job, 7)
    simulation.plan = replace(simulation.plan, stage_work=(1.0, 1.0))
    cleared = [
        one for one in judged(simulation, job, 8) if isinstance(one, KeepsUp) and one.is_design
    ]
    assert [(one.round, one.rank) for one in cleared] == [(1, 4)]
    document = revised(blank("job"), [found], FindingContext(NOW, 1, id_from)).document
    (fact,) = revised(document, cleared, FindingContext(NOW, 1, id_from)).facts
    assert isinstance(fact, StragglerCleared)
    assert fact.finding == document.found[0].finding


@pytest.mark.parametrize("seed", range(3))
def test_many_slow_ranks_of_a_stage_are_no_design(seed: int) -> None:
    """Three of eight."""
    delays = tuple(Delay(rank, 0.05) for rank in (8, 11, 14))
    plan = Training(nodes=4, stages=2, seed=seed, stage_work=(1.0, 1.0), delays=delays)
    changes = judged(pipeline(plan), JobJudge("job", LiveRules()), 12)
    assert uneven(changes) == []
    assert {one.rank for one in changes if isinstance(one, SlowRankFound)} == {8, 11, 14}


def test_the_price_of_uneven_stages_is_near_the_truth() -> None:
    """Each microbatch waits for the stage that takes longest; the first and the last do not."""
    simulation = DeviceSimulation(PIPELINE, microbatches=16)
    (change,) = uneven(judged(simulation, JobJudge("job", LiveRules()), 8))
    even = DeviceSimulation(replace(PIPELINE, stage_work=(1.15,) * 4), microbatches=16)
    even.run(8 * 16)
    truth = (simulation.now.max() - simulation.begun) / (even.now.max() - even.begun)
    assert change.role == "stage 3"
    assert change.slowdown_ratio is not None
    assert 1 + change.slowdown_ratio == pytest.approx(truth, rel=0.05)


def test_the_policy_acts_on_no_design() -> None:
    """Not after any time: another node would have as much to do."""
    changes = judged(pipeline(UNEVEN), JobJudge("job", LiveRules()), 8)
    document = revised(blank("job"), changes, FindingContext(NOW, 1, id_from))
    (fact,) = document.facts
    assert isinstance(fact, StragglerFound)
    assert (fact.cause, fact.failure_class, fact.role) == ("design", "tune", "stage 1")
    policy, switches = Policy(), StragglerSwitches(stop_mode="enforce", exclude_mode="enforce")
    for window in range(100):
        policy.report(document.document.found, {4: 9.0}, window, switches, window * 100.0)
        assert policy.due(document.document.found, switches, window * 100.0) == []


def known(rank: int, round_number: int = 1) -> KnownStraggler:
    return KnownStraggler(
        finding=f"f{rank}", round=round_number, rank=rank, node="node-1", slot=1, found_at=NOW,
        cause="design", reason="because",
    )  # fmt: skip


@pytest.mark.parametrize("is_early", [True, False])
def test_another_replica_goes_on_with_it(is_early: bool) -> None:
    """It is not found again, and cleared when it is over."""
    simulation, job = pipeline(UNEVEN), JobJudge("job", LiveRules())
    if is_early:
        job.adopt([known(4)])
    else:
        assert judged(simulation, job, 2) == []
        job.adopt([known(4)])
    assert judged(simulation, job, 10) == []
    assert without_costs(job.end("the job is over")) == [
        KeepsUp(1, 4, "the job is over", is_design=True)
    ]


def test_one_of_an_older_round_is_over() -> None:
    simulation, job = pipeline(replace(UNEVEN, round=2)), JobJudge("job", LiveRules())
    job.adopt([known(4)])
    (over,) = judged(simulation, job, 1)
    assert over == KeepsUp(1, 4, "round 2 began", is_design=True)
