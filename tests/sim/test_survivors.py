"""After any faults all ranks train on what an undisturbed training has, and the training ends."""

from collections import Counter

import pytest

from tests.sim.survivor_processes import LAYOUTS
from tests.sim.survivors import Trial


def outcomes(seeds: range, layout: str = "", faults: int | None = None) -> Counter[str]:
    """What happened in these schedules, and how often."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            trial = Trial(seed, layout, faults).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts += trial.outcomes
        counts["agreements that lost steps"] += sum(map(bool, trial.lost))
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_those_of_an_undisturbed_training(layout: str) -> None:
    counts = outcomes(range(60), layout)
    assert counts["first"] >= 60
    assert counts["live"] or layout == "FSDP 4"


def test_a_replica_that_lives_loses_no_step() -> None:
    counts = outcomes(range(100), "DDP 4", faults=1)
    assert counts["live"] > 20, counts
    assert counts["agreements that lost steps"] == 0, counts


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(20))
def test_a_hundred_thousand_schedules(chunk: int) -> None:
    counts = outcomes(range(chunk * 5000, chunk * 5000 + 5000))
    assert min(counts["live"], counts["image"], counts["fresh"]) > 0, counts
