"""Who is named for hangs of 64 ranks: the benchmark's script over a made backend."""

from collections import Counter

import pytest

from benchmarks.parallel_hang_runs.simulated import score

pytestmark = [pytest.mark.variant, pytest.mark.timeout(600)]
_RUNS = 40


@pytest.mark.parametrize(("is_gloo", "least"), [(True, 0.95), (False, 0.85)])
def test_the_rank_is_named_and_no_other(is_gloo: bool, least: float) -> None:
    scores = score(_RUNS, 880_000, (4, 4, 4), is_gloo=is_gloo)
    total = sum(scores.values(), Counter())
    assert total["wrong"] == 0, scores
    assert total["right"] >= least * _RUNS, scores


@pytest.mark.parametrize("fault", ["skips_sample", "wrong_peer", "wrong_root"])
def test_what_no_recorder_of_gloo_shows_is_named(fault: str) -> None:
    (of,) = score(10, 880_000, (4, 4, 4), is_gloo=True, fault=fault).values()
    assert of["wrong"] == of["silent"] == 0, of
    assert of["right"] >= 5, of


@pytest.mark.parametrize("is_gloo", [True, False])
def test_groups_of_two_are_judged_by_groups_like_them(is_gloo: bool) -> None:
    """Splits of all_to_all and roots that differ are in no recorder of NCCL's."""
    scores = score(60, 880_000, (2, 2, 2), is_gloo=is_gloo)
    hidden = sum(
        (scores.get(fault, Counter()) for fault in ("wrong_split", "wrong_root")), Counter()
    )
    total = sum(scores.values(), Counter())
    assert total["wrong"] == 0, scores
    assert total["right"] >= 0.9 * (60 - (0 if is_gloo else hidden["silent"])), scores
