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
    SlownessLimits,
    VerdictState,
    Window,
    middle,
    observe,
)

LIMITS = SlownessLimits()
NAN = float("nan")


def noisy(ranks: int, seed: int = 0, **slow: float) -> list[float]:
    """Own times around 1, with 0.3 % of noise; `r3=1.2` is a rank's factor."""
    times = np.random.default_rng(seed).normal(1, 0.003, ranks)
    for name, factor in slow.items():
        times[int(name[1:])] *= factor
    return [float(one) for one in times]


def run(
    windows: Sequence[Sequence[float]],
    roles: Sequence[int] | None = None,
    limits: SlownessLimits = LIMITS,
) -> list[Found | Cleared]:
    state = VerdictState()
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
    state = VerdictState()
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


def episode(
    ranks: int, slow: Sequence[int], factor: float = 1.3, spread: float = 0.003
) -> list[list[float]]:
    """Twelve windows, then eighteen in which these are slower, then fifteen as before."""
    windows = []
    for number in range(45):
        own = np.random.default_rng(number).normal(1, spread, ranks)
        if 12 <= number < 30:
            own[list(slow)] *= factor
        windows.append([float(one) for one in own])
    return windows


@pytest.mark.parametrize("factor", [1.15, 1.3, 3.0])
@pytest.mark.parametrize(
    ("ranks", "slow"),
    [(4, [1, 2]), (4, [1, 2, 3]), (3, [0, 2]), (8, [4, 5, 6, 7]), (8, [0, 1, 2, 3, 5, 7])],
)
def test_half_of_all_ranks_or_more_that_become_slow_are_named(
    ranks: int, slow: list[int], factor: float
) -> None:
    """Against their own earlier times: the others are as fast as before. Cleared, too (A6.1)."""
    changes = run(episode(ranks, slow, factor))
    found = [one for one in changes if isinstance(one, Found)]
    cleared = [one for one in changes if isinstance(one, Cleared)]
    assert {one.subject for one in found} == {one.subject for one in cleared} == set(slow)
    assert len(changes) == 2 * len(slow)
    assert all(12 < one.window <= 14 and one.growth_ratio is not None for one in found)
    assert [one.growth_ratio for one in found] == pytest.approx([factor - 1] * len(slow), rel=0.1)
    assert all(30 < one.window <= 36 for one in cleared)


def test_half_of_all_ranks_slow_one_after_another_are_named() -> None:
    windows = episode(4, [1])
    for own in windows[20:30]:
        own[2] *= 1.3
    changes = run(windows)
    assert [one.subject for one in changes if isinstance(one, Found)] == [1, 2]
    assert {one.subject for one in changes if isinstance(one, Cleared)} == {1, 2}


@pytest.mark.parametrize(
    "factors",
    [[1.3] * 4, [0.7, 0.7, 1, 1], [1.3, 1.3, 1.08, 1.08], [1.3, 1.25, 1.2, 1.28]],
    ids=["all slower", "half faster", "the others slower, too", "all slower, unequally"],
)
def test_nobody_is_named_for_what_is_not_half_of_the_ranks_becoming_slow(
    factors: list[float],
) -> None:
    windows = [noisy(4, seed) for seed in range(40)]
    for own in windows[12:]:
        own[:] = [one * factor for one, factor in zip(own, factors, strict=True)]
    assert {one.subject for one in run(windows)} <= set(np.flatnonzero(np.array(factors) > 1.21))
    if len(set(factors)) < 3:
        assert run(windows) == [] or factors[2] == 1.08


@pytest.mark.parametrize("spread", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_halves_of_noisy_ranks_are_not_named(ranks: int, spread: float) -> None:
    """500 windows; every seventh is longer on all ranks (A6.2)."""
    random = np.random.default_rng(ranks)
    windows = random.normal(1, spread, (500, ranks)) * np.where(np.arange(500) % 7, 1, 1.4)[:, None]
    found = [one for one in run(windows.tolist()) if isinstance(one, Found)]
    assert [one for one in found if one.growth_ratio is not None] == []


@pytest.mark.parametrize("slow", [[1], [1, 2], [1, 2, 3]], ids=["one", "two", "three of four"])
def test_an_episode_does_not_teach_how_large_the_noise_is(slow: list[int]) -> None:
    """While it lasts all ranks are noisy; then the limit is as it was before."""
    windows = episode(4, slow, 1.5)
    for number in range(14, 30):
        noise = np.random.default_rng(number + 99).normal(1, 0.05, 4)
        windows[number] = [one * more for one, more in zip(windows[number], noise, strict=True)]
    for own in windows[37:]:
        own[0] *= 1.05
    state, noises = VerdictState(), []
    changes: list[Found | Cleared] = []
    for number, own in enumerate(windows):
        window = Window(number, np.arange(4), np.array(own), np.zeros(4, int))
        state, changed = observe(state, window, LIMITS)
        changes += changed
        noises.append(float(np.sqrt(state.noise[0].now())))
    assert noises[36] < 1.5 * noises[11]
    late = [(one.subject, one.window) for one in changes if isinstance(one, Found)][len(slow) :]
    assert late == [(0, 39)], "5 % more is found in three windows"


def test_a_long_episode_of_few_among_many_leaves_the_noise_to_the_others() -> None:
    """Of 64 ranks one is slow for good; then all become noisy, and nobody else is found."""
    windows = [noisy(64, seed, r5=1.2) for seed in range(20)]
    random = np.random.default_rng(5)
    windows += [(np.array(one) * random.normal(1, 0.02, 64)).tolist() for one in windows * 5]
    assert {one.subject for one in run(windows) if isinstance(one, Found)} == {5}


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
    state, high = VerdictState(), replace(LIMITS, found_ratio=5.0, cleared_ratio=2.5)
    for number, own in enumerate(windows):
        window = Window(number, np.arange(8), np.array(own), np.zeros(8, int))
        state, changes = observe(state, window, high)
        assert changes == ()
    for number in (6, 7):
        own = windows[0] if number == 7 else [*windows[0][:5], NAN, *windows[0][6:]]
        window = Window(number, np.arange(8), np.array(own), np.zeros(8, int))
        state, changes = observe(state, window, LIMITS)
        assert [one.subject for one in changes] == ([5] if number == 7 else [])
