"""Of 64 ranks one raises and 63 fall with it: whatever comes first, the one is named."""

from collections import Counter

import pytest

from tests.sim.falling_ranks import Falling


def named(seeds: range, leaves_s: float = 0.0) -> Counter[bool]:
    """How often it was the one that raised."""
    found: Counter[bool] = Counter()
    for seed in seeds:
        falling = Falling(seed, leaves_s=leaves_s)
        try:
            found[falling.run().rank == falling.raised] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return found


@pytest.mark.parametrize("chunk", range(4))
def test_the_one_that_raised_is_named(chunk: int) -> None:
    """Also where its agent is late, or its process takes its time to exit (A4.5)."""
    found = named(range(chunk * 250, chunk * 250 + 250))
    assert found[True] >= 0.99 * found.total(), found


@pytest.mark.parametrize("leaves_s", [0.003, 0.1])
def test_one_that_leaves_its_group_before_its_script_ends_is_named(leaves_s: float) -> None:
    """All connections close first, and others tell of it before the rank does (A4.5)."""
    found = named(range(200), leaves_s=leaves_s)
    assert found[True] >= 0.99 * found.total(), found
