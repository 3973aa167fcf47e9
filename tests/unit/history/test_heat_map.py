"""The colours of the heat map: what is slow is seen, whatever else happened."""

import numpy as np

from everstep_services.history.api.endpoints.heat_map import colour_scale


def noisy(ranks: int, windows: int) -> np.ndarray:
    return np.random.default_rng(7).normal(0.36, 0.004, (ranks, windows))


def shade(value: float, low: float, high: float) -> float:
    return min(1.0, max(0.0, (value - low) / (high - low)))


def test_a_slow_rank_is_seen_beside_a_window_in_which_all_were_slow() -> None:
    for ranks in (4, 8, 128):
        values = noisy(ranks, 6)
        values[:, 0] *= 100  # the first window: compilation
        values[2, 3:] *= 1.3
        low, high = colour_scale(values)
        others = [shade(value, low, high) for value in values[3, 1:]]
        assert shade(values[2, 4], low, high) - max(others) > 0.3, ranks


def test_ranks_that_hardly_differ_have_hardly_different_colours() -> None:
    values = noisy(64, 30)
    values[7, 20] = 40.0
    low, high = colour_scale(values)
    shades = [shade(value, low, high) for value in np.delete(values, 7, axis=0).ravel()]
    assert max(shades) - min(shades) < 0.35


def test_ranks_that_differ_by_a_hundredth_are_no_slow_and_fast_ones() -> None:
    values = np.array([[0.0544], [0.0548], [0.0546], [0.0552]])
    low, high = colour_scale(values)
    shades = [shade(value, low, high) for value in values.ravel()]
    assert max(shades) - min(shades) < 0.1


def test_gaps_and_nothing_have_a_scale() -> None:
    values = noisy(4, 4)
    values[1:, :2] = np.nan
    values[:, 3] = np.nan
    low, high = colour_scale(values)
    assert 0 < low < high < 1
    assert colour_scale(np.full((4, 3), np.nan)) == (0.0, 1.0)
    assert colour_scale(np.zeros((4, 3))) == (0.0, 0.0)
