"""The table of incident causes: one row for each, and a safe meaning for words that are unknown."""

from typing import get_args

import pytest

from everstep.incident_causes import NODE, IncidentCause, known_cause, meaning_of

CAUSES: tuple[IncidentCause, ...] = get_args(IncidentCause)


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_a_meaning_and_is_found_by_its_word(cause: IncidentCause) -> None:
    assert meaning_of(cause).fault is not None
    assert known_cause(cause) == cause


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if meaning_of(cause).costs_restart])
def test_a_cause_that_costs_a_restart_opens_an_incident(cause: IncidentCause) -> None:
    assert meaning_of(cause).opens_incident


def test_only_a_lost_node_explains_all_other_reports() -> None:
    assert [cause for cause in CAUSES if meaning_of(cause).weight == NODE] == ["node_lost"]


def test_a_script_is_to_blame_for_what_it_may_repeat() -> None:
    recurring = {cause for cause in CAUSES if meaning_of(cause).can_recur}
    assert recurring == {"rank_exited", "rank_stalled", "start_failed"}


def test_a_word_of_a_newer_release_costs_no_restart_and_blames_nobody() -> None:
    meaning = meaning_of("solar_flare")
    assert (meaning.fault, meaning.costs_restart, known_cause("solar_flare")) == (
        (),
        False,
        "other",
    )


def test_ranks_are_kept_where_their_state_is_good_and_nobody_wants_new_ones() -> None:
    assert {cause for cause in CAUSES if not meaning_of(cause).keeps_ranks} == {
        "operator", "numerics", "restarted_in_process", "done", "other"
    }  # fmt: skip
