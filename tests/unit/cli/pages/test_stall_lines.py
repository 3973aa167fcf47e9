"""A stall in plain words, and the ranks that are watched again and again."""

from typing import Any

import pytest

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.pages.incidents.stall import stall_lines
from everstep_services.cli.pages.ranks import said, watch_ranks
from everstep_services.cli.times import seconds

STALL: dict[str, Any] = {
    "id": "s1", "rank": 3, "section": "data", "step": 1204, "waited_s": 31.0, "limit_s": 30.0,
    "limit_source": "learned", "limit_origin": None,
    "blocked_in": "it waits for a lock (futex_wait_queue)",
}  # fmt: skip
LOCATED: dict[str, Any] = {
    "first_ranks": [3], "first_nodes": ["n2"], "section": "data", "lead_s": 4.2,
    "waiting_ranks": 63, "is_certain": True, "reason": None,
}  # fmt: skip


def told(**incident: Any) -> list[str]:
    return list(stall_lines({"stall": None, "stalls": [], "located": None, **incident}))


def test_a_stall_says_who_stopped_first_past_which_limit_and_who_waited() -> None:
    assert told(stall=STALL, stalls=[STALL], located=LOCATED) == [
        "  rank 3 on n2 stopped first in section data, 4.2 s before all others",
        "  rank 3 made no progress for 31 s in section data after step 1204; the limit there is "
        "30 s, learned from how long it takes",
        "  of its process: it waits for a lock (futex_wait_queue)",
        "  63 other ranks waited for it",
    ]


def test_what_is_not_known_is_not_said() -> None:
    assert told() == []
    stall = {**STALL, "section": None, "step": None, "blocked_in": None, "limit_source": "new"}
    (line,) = told(stall=stall, stalls=[stall])
    assert line == "  rank 3 made no progress for 31 s; the limit there is 30 s, new"


def test_a_limit_that_was_set_names_its_origin() -> None:
    origin = "inprocess.Wrapper, which ends it"
    (line, _) = told(stall={**STALL, "limit_source": "configured", "limit_origin": origin})
    assert line.endswith("the limit there is 30 s, set by inprocess.Wrapper, which ends it")
    (line, _) = told(stall={**STALL, "limit_source": "configured"})
    assert line.endswith("set by --limit or `everstep limits set`")


def test_several_that_stopped_together_are_only_likely_the_first() -> None:
    ranks = list(range(8))
    located = {**LOCATED, "first_ranks": ranks, "is_certain": False, "lead_s": None}
    others = [{**STALL, "id": f"o{rank}", "rank": rank} for rank in ranks]
    lines = told(located=located, stalls=others)
    assert lines[0] == (
        "  ranks 0, 1, 2, 3, 4 and 3 more on n2 stopped first in section data (likely: beats "
        "cannot tell for sure)"
    )
    assert lines[1].endswith("rank 4 in section data and 3 more")
    assert len(lines) == 2  # nothing tells that the others wait for them


def test_beside_the_ranks_it_says_how_old_and_how_complete_the_view_is() -> None:
    found = {
        "round": 3, "states": {"stalled": 1, "running": 7}, "note": "n2 was last heard 12 s ago",
        "is_stale": True, "next": "x", "items": [{}, {}],
    }  # fmt: skip
    assert list(said(found)) == [
        "round 3: 7 running, 1 stalled",
        "stale: n2 was last heard 12 s ago",
        "only the first 2 ranks: see --limit",
    ]


def test_watching_goes_on_while_the_api_is_away_but_needs_it_at_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = CliError("the API is away", Exit.UNREACHABLE)
    shown: list[str] = []
    answers: list[CliError | None] = [None, away, None, CliError("no such job", Exit.NOT_FOUND)]

    def show() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        shown.append("ranks")

    waits: list[float] = []
    with pytest.raises(CliError, match="no such job"):
        watch_ranks(show, 1.0, sleep=waits.append)
    assert (shown, waits) == (["ranks", "ranks"], [1.0, 1.0, 1.0])
    assert capsys.readouterr().err == "everstep: the API is away\n"
    answers.append(away)
    with pytest.raises(CliError, match="the API is away"):
        watch_ranks(show, 1.0, sleep=waits.append)


@pytest.mark.parametrize(
    ("text", "found"),
    [("30s", 30.0), ("1.5m", 90.0), ("2h", 7200.0), ("30", None), ("-1s", None), ("s", None)],
)
def test_a_length_of_time_may_have_a_fraction(text: str, found: float | None) -> None:
    assert seconds(text) == found
