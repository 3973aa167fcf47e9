"""The table of causes of slow ranks: one row for each, and a safe meaning for unknown words."""

from typing import get_args

from everstep.slow_rank_causes import (
    CURABLE,
    OF_NODE,
    SlowRankCause,
    known_slow_rank_cause,
    meaning_of,
)


def test_lists_and_table_agree() -> None:
    causes: tuple[SlowRankCause, ...] = get_args(SlowRankCause)
    assert set(CURABLE) == {cause for cause in causes if meaning_of(cause).is_curable}
    assert set(OF_NODE) == {cause for cause in causes if meaning_of(cause).is_of_node}


def test_only_what_a_node_causes_asks_for_another_node() -> None:
    for cause in OF_NODE:
        assert meaning_of(cause).helps == "replace"
        assert cause in CURABLE


def test_a_word_of_a_newer_release_blames_no_node() -> None:
    assert known_slow_rank_cause("host") == "host"
    assert not meaning_of(known_slow_rank_cause("solar_flare")).is_of_node
