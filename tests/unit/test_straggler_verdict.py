"""Who is slow: found once, cleared once, and never for a reason that all ranks share."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.straggler_traces.detectors import everstep
from benchmarks.straggler_traces.distributions import PLAIN, VARIABLE, Slow, own_times
from everstep_services.straggler.domain.verdict import (
    Cleared,
    Found,
    Limits,
    State,
    Window,
    middle,
    observe,
)

LIMITS = Limits()
NAN = float("nan")


def noisy(ranks: int, seed: int = 0, **slow: float) -> list[float]:
    """Own times around 1, with 0.3 % of noise; `r3=1.2` is a rank's factor."""
    times = np.random.default_rng(seed).normal(1, 0.003, ranks)
    for name, factor in slow.items():
        times[int(name[1:])] *= factor
    return [float(one) for one in times]


def run(
    windows: Sequence[Sequence[float]], roles: Sequence[int] | None = None, limits: Limits = LIMITS
) -> list[Found | Cleared]:
    state = State()
    changes: list[Found | Cleared] = []
    for number, own in enumerate(windows):
        role = np.array(roles if roles is not None else [0] * len(own))
        window = Window(number, np.arange(len(own)), np.array(own), role)
        state, changed = observe(state, window, limits)
        changes += changed
    return changes


def test_a_slow_rank_is_found_once_within_three_windows() -> None:
    """The rank that is a tenth slower is named, and no other (A6.1)."""
    found = run([noisy(8, seed, r5=1.1) for seed in range(20)])
    assert [type(one) for one in found] == [Found]
    (one,) = found
    assert isinstance(one, Found)
    assert (one.subject, one.window, one.since) == (5, 2, 0)
    assert one.ratio == pytest.approx(0.1, abs=0.01)


def test_one_slow_window_is_a_hiccup() -> None:
    """One slow window is too few (A6.2)."""
    windows = [noisy(8, seed, **({"r5": 3.0} if seed == 6 else {})) for seed in range(20)]
    assert run(windows) == []


def test_it_is_cleared_once_when_it_keeps_up_again() -> None:
    windows = [noisy(8, seed, r5=1.1 if seed < 10 else 1.0) for seed in range(20)]
    found, cleared = run(windows)
    assert isinstance(found, Found)
    assert isinstance(cleared, Cleared)
    assert (cleared.subject, cleared.since) == (5, found.since)
    assert 11 <= cleared.window <= 13
    assert cleared.ratio == pytest.approx(0, abs=0.01)
    assert cleared.ratio is not None
    assert cleared.limit is not None
    assert max(cleared.ratio, LIMITS.cleared_ratio) < cleared.limit < LIMITS.found_ratio


def test_between_both_limits_nothing_changes() -> None:
    quiet = [noisy(8, seed, r5=1.02) for seed in range(30)]
    assert run(quiet) == []
    windows = [noisy(8, seed, r5=1.1 if seed < 5 else 1.04) for seed in range(30)]
    assert [type(one) for one in run(windows)] == [Found]


def test_a_rank_that_is_gone_is_cleared() -> None:
    state = State()
    changes: list[Found | Cleared] = []
    for number in range(6):
        ranks = np.arange(8) if number < 4 else np.delete(np.arange(8), 5)
        own = np.array(noisy(8, number, r5=1.2))[ranks]
        state, changed = observe(
            state, Window(number, ranks, own, np.zeros(len(ranks), int)), LIMITS
        )
        changes += changed
    assert [(type(one), one.subject) for one in changes] == [(Found, 5), (Cleared, 5)]
    assert isinstance(changes[1], Cleared)
    assert changes[1].ratio is None


def test_windows_that_are_missing_speak_neither_for_nor_against_a_rank() -> None:
    windows = [noisy(8, seed, r5=1.2) for seed in range(12)]
    for number in (1, 3, 5):
        windows[number][5] = NAN
    for number in (10, 11):
        windows[number][5] = NAN
    assert [(type(one), one.window) for one in run(windows)] == [(Found, 4)]


def test_a_slow_rank_is_cleared_by_windows_with_gaps_between_them() -> None:
    windows = [noisy(8, seed, r5=1.2) for seed in range(3)]
    windows += [noisy(8, seed) for seed in range(3, 9)]
    for number in (4, 6):
        windows[number][5] = NAN
    assert [(type(one), one.window) for one in run(windows)] == [(Found, 2), (Cleared, 7)]


def test_ranks_are_compared_within_their_role_only() -> None:
    """A6.3: the last stage has twice the work, and nobody is at fault."""
    windows = [[*noisy(8, seed), *(2 * one for one in noisy(8, seed + 99))] for seed in range(20)]
    assert run(windows, [0] * 8 + [1] * 8) == []
    slow = [[*noisy(8, seed, r2=1.1), *(2 * one for one in noisy(8, seed + 99))]
            for seed in range(20)]  # fmt: skip
    assert [(one.subject, one.window) for one in run(slow, [0] * 8 + [1] * 8)] == [(2, 2)]


def test_two_ranks_cannot_tell_which_of_them_is_slow() -> None:
    assert run([[1.0, 2.0]] * 10) == []


def test_what_all_ranks_share_is_not_held_against_one() -> None:
    windows = [[one * (3 if seed > 5 else 1) for one in noisy(8, seed)] for seed in range(20)]
    assert run(windows) == []


def test_what_is_no_time_is_not_judged() -> None:
    assert run([[NAN] * 8] * 5) == []
    assert run([[0.0] * 8] * 5) == []
    assert run([[]] * 5) == []


def test_half_of_all_ranks_slow_does_not_crash_and_names_nobody_fast() -> None:
    windows = [noisy(8, seed, r0=1.5, r1=1.5, r2=1.5) for seed in range(10)]
    assert {one.subject for one in run(windows)} <= {0, 1, 2}


def test_the_middle_half() -> None:
    assert middle(np.array([[5.0, 1.0, 3.0]])).tolist() == [3]
    assert middle(np.array([[0.0, 1.0, 2.0, 100.0]])).tolist() == [1.5]
    assert middle(np.array([[1.0]])).tolist() == [1]
    assert np.isnan(middle(np.array([[1.0, NAN, 3.0]]))).all()


@pytest.mark.parametrize("noise", [PLAIN, VARIABLE], ids=["plain", "variable lengths"])
@pytest.mark.parametrize("seed", range(4))
def test_a_tenth_slower_is_found_in_a_simulated_training_and_nobody_else(
    noise: object, seed: int
) -> None:
    """A6.1 on simulated times; `benchmarks/stragglers.py` has the figures."""
    assert isinstance(noise, type(PLAIN))
    own = own_times(seed, 600, 64, noise, (Slow(seed * 7, 0.10, 50),))
    assert everstep(own) == {seed * 7}


@pytest.mark.parametrize("noise", [PLAIN, VARIABLE], ids=["plain", "variable lengths"])
def test_nobody_is_found_in_healthy_hours(noise: object) -> None:
    """A6.2: two simulated hours of 64 ranks."""
    assert isinstance(noise, type(PLAIN))
    assert everstep(own_times(77, 7200, 64, noise)) == set()


def test_nothing_is_said_of_a_rank_in_a_window_in_which_it_was_not_seen() -> None:
    """Whatever changes meanwhile: a limit that is lowered, say."""
    windows = [noisy(8, seed, r5=1.2) for seed in range(6)]
    state, high = State(), replace(LIMITS, found_ratio=5.0, cleared_ratio=2.5)
    for number, own in enumerate(windows):
        window = Window(number, np.arange(8), np.array(own), np.zeros(8, int))
        state, changes = observe(state, window, high)
        assert changes == ()
    for number in (6, 7):
        own = windows[0] if number == 7 else [*windows[0][:5], NAN, *windows[0][6:]]
        window = Window(number, np.arange(8), np.array(own), np.zeros(8, int))
        state, changes = observe(state, window, LIMITS)
        assert [one.subject for one in changes] == ([5] if number == 7 else [])
