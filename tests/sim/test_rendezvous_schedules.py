"""Rendezvous under random faults: whatever happens, what must hold holds."""

import os

import pytest

from tests.sim.fleet import Fleet
from tests.variants import variant

_CHUNKS = 40
_PER_CHUNK = 2_500


def play(seed: int, *, forgets: bool = False) -> Fleet:
    """One schedule. The seed is in the error, to play it again."""
    fleet = Fleet(seed, forgets=forgets)
    try:
        document = fleet.run()
        assert document is not None
        fleet.record.check_end(document)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return fleet


@pytest.mark.parametrize("chunk", [0, variant(1), variant(2), variant(3)])
def test_a_thousand_schedules(chunk: int) -> None:
    fleets = [play(seed) for seed in range(chunk * 275, chunk * 275 + 275)]
    # The schedules are worth something: rounds were lost, and replicas raced.
    assert sum(fleet.record.rounds for fleet in fleets) > 500
    assert sum(fleet.conflicts for fleet in fleets) > 100
    assert sum(fleet.record.excuses for fleet in fleets) > 20
    assert sum(fleet.record.agreed for fleet in fleets) > 20
    assert sum(fleet.record.distrusted for fleet in fleets) > 5
    assert sum(fleet.record.measured for fleet in fleets) > 100
    assert sum(fleet.record.sent_away for fleet in fleets) > 5
    assert sum(fleet.record.moved for fleet in fleets) > 5
    assert sum(fleet.record.held for fleet in fleets) > 5


def test_schedules_in_which_the_document_is_lost() -> None:
    """300 schedules with random faults keep all invariants (A14.3)."""
    fleets = [play(seed, forgets=True) for seed in range(300)]
    assert sum(fleet.record.rounds for fleet in fleets) > 500


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_a_hundred_thousand_schedules(chunk: int) -> None:
    base = int(os.environ.get("EVERSTEP_TEST_SEED", "1000000"))
    for seed in range(base + chunk * _PER_CHUNK, base + (chunk + 1) * _PER_CHUNK):
        play(seed)
