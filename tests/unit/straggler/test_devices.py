"""Accelerators: how long operations lasted shows which rank came last, not which asked for them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from everstep.messages import NodeTimings, RankTiming
from everstep_services.straggler.domain.changes import Change, SlowRankFound
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.live.device_times import device_times_us
from everstep_services.straggler.domain.rules import LiveRules
from tests.unit.messages.sketches import sketch_of
from tests.unit.straggler.changes import without_costs
from tests.unit.straggler.device_windows import DeviceSimulation
from tests.unit.straggler.windows import Delay, Training, healthy


def judged(simulation: DeviceSimulation, windows: int) -> tuple[JobJudge, list[Change]]:
    print("seed", simulation.plan.seed)
    job, changes = JobJudge("job", LiveRules()), list[Change]()
    for number in range(windows):
        for timings in simulation.window():
            job.hear(timings, float(number))
        changes += without_costs(job.close_due(float(number)))
    return job, changes


PIPELINE = Training(nodes=4, stages=4, stage_work=(1, 1.1, 0.9, 1.2))
PLANS = {
    "data parallel": (Training(), 0),
    "buckets": (Training(buckets=3), 0),
    "tensor parallel": (Training(nodes=4, tensor=4), 0),
    "pipeline": (PIPELINE, 4),
    "unmodified pipeline": (replace(PIPELINE, has_sections=False), 4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("seed", range(4))
def test_the_rank_whose_operations_last_shortest_is_waited_for(
    plan: tuple[Training, int], seed: int
) -> None:
    """20 ms in steps of 100 ms; threads ask ahead, and clocks are wrong (A6.1, A6.3)."""
    random = np.random.default_rng(seed)
    training, microbatches = plan
    rank = int(random.integers(training.world))
    training = replace(training, seed=seed, offset_s=0.5, delays=(Delay(rank, 0.02, "forward"),))
    simulation = DeviceSimulation(training, microbatches=microbatches, ahead=seed % 2)
    _, changes = judged(simulation, 3)
    (found,) = changes
    assert isinstance(found, SlowRankFound)
    assert found.rank == rank
    own = found.scores[0]
    assert own.value_s is not None
    assert own.reference_s is not None
    assert own.value_s - own.reference_s == pytest.approx(0.02, rel=0.25)
    other = DeviceSimulation(healthy(training), microbatches=microbatches)
    other.run(48)
    truth = (simulation.now.max() - simulation.begun) / (other.now.max() - other.begun)
    assert found.slowdown_ratio is not None
    assert 1 + found.slowdown_ratio == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nobody_is_named_where_all_devices_keep_up(plan: tuple[Training, int]) -> None:
    """Stages that have more to do included (A6.2, A6.3)."""
    training, microbatches = plan
    _, changes = judged(DeviceSimulation(training, microbatches=microbatches, ahead=1), 30)
    assert [one for one in changes if isinstance(one, SlowRankFound)] == []


def test_by_when_they_are_asked_for_nobody_could_tell() -> None:
    """The same training without durations: its thread asks for all at once."""
    training = Training(delays=(Delay(3, 0.02, "forward"),), has_hosts=False, has_sections=False)
    _, changes = judged(DeviceSimulation(training, is_timed=False), 3)
    assert changes == []


def test_durations_that_are_partly_missing_are_left_out() -> None:
    """The newest are not over yet when the recorder is read (A6.1)."""
    training = Training(delays=(Delay(3, 0.02, "forward"),))
    simulation, job = DeviceSimulation(training), JobJudge("job", LiveRules())
    changes: list[Change] = []
    for number in range(3):
        for timings in simulation.window():
            job.hear(replaced(timings, _without_newest), float(number))
        changes += without_costs(job.close_due(float(number)))
    assert [one.rank for one in changes if isinstance(one, SlowRankFound)] == [3]


def test_who_waits_for_whom_is_shown_of_transfers_too() -> None:
    training = replace(PIPELINE, delays=(Delay(5, 0.02, "forward"),))
    job, _ = judged(DeviceSimulation(training, microbatches=4), 3)
    groups = {one.group: one for one in job.scores(16, "").groups}
    assert groups["pp1 transfers"].last_rank == 5
    assert groups["pp1 transfers"].ranks == 4
    assert groups["1001"].last_rank == 5


def test_the_earliest_times_that_durations_allow() -> None:
    """Two ranks in two collectives: the second is asked for early, and lasts until both end."""
    row, cell = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    asked, lasted = np.array([0, 1, 0, 1]), np.array([100, 300, 10, 250])
    found = device_times_us(row, cell, asked, lasted)
    assert found is not None
    assert found.tolist() == [0, 100, 90, 150]


def test_operations_without_a_common_order_are_not_placed() -> None:
    row, cell = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 0])
    times = np.array([0, 1, 0, 1])
    assert device_times_us(row, cell, times, times) is None


def replaced(timings: NodeTimings, change: Callable[[RankTiming], RankTiming]) -> NodeTimings:
    return replace_struct(timings, ranks=tuple(change(one) for one in timings.ranks))


def _without_newest(one: RankTiming) -> RankTiming:
    runs = [replace_struct(run, lasted_us=(*run.lasted_us[:-2], -1, -1)) for run in one.collectives]
    return replace_struct(one, collectives=tuple(runs))


def test_the_device_time_of_a_section_says_where_it_is_slow() -> None:
    """The thread only waits there, and the clock of the device is as high as others' (A6.1)."""
    training = Training(delays=(Delay(3, 0.02, "sleep"),))
    simulation, job = DeviceSimulation(training), JobJudge("job", LiveRules())
    changes: list[Change] = []
    for number in range(3):
        for timings in simulation.window():
            job.hear(replaced(timings, _with_devices), float(number))
        changes += without_costs(job.close_due(float(number)))
    (found,) = changes
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause, found.section) == (3, "compute", "forward")
    assert "in section forward on the device" in found.reason
    assert found.scores[1].signal == "device:forward"


def _with_devices(one: RankTiming) -> RankTiming:
    """What sections took, as the device's events tell; the thread has asked for it and went on."""
    quick = sketch_of([0.001] * 16)
    sections = [
        replace_struct(section, wall=quick if section.section else section.wall,
                       device=section.wall)
        for section in one.sections
    ]  # fmt: skip
    return replace_struct(one, sections=tuple(sections))
