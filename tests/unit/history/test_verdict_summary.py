"""A verdict in a line, as REST, `everstep why` and reports have it."""

from typing import Any

import pytest

from everstep_services.history.api.dto.incidents import verdict_summary

NONE: dict[str, Any] = {
    "cause": "unknown", "cause_kind": None, "confidence": 0.921, "culprit_ranks": None,
    "culprit_nodes": None, "is_corrected": False, "is_inconclusive": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        ({"is_inconclusive": True}, "inconclusive"),
        ({"cause": "host"}, "host (92 % sure)"),
        (
            {"cause": "user_code", "cause_kind": "python_exception", "culprit_ranks": [2]},
            "user_code, python exception (92 % sure)",
        ),
        ({"cause": "host", "is_corrected": True}, "host (a person decided)"),
        (
            {"cause_kind": "killed", "culprit_ranks": [2]},
            "cause unknown: killed by SIGKILL, and nobody on record sent it; "
            "confidence 92 % that rank 2 is the culprit",
        ),
        (
            {"cause_kind": "brand_new", "culprit_nodes": ["n1", "n2"]},
            "cause unknown: brand new; confidence 92 % that nodes n1, n2 are the culprits",
        ),
        (
            {"cause_kind": "unseen", "culprit_ranks": list(range(9))},
            "cause unknown: nobody saw how it ended; "
            "confidence 92 % that ranks 0, 1, 2, 3, 4, 5 and 3 more are the culprits",
        ),
        ({}, "cause unknown; confidence 92 %"),
        ({"is_corrected": True}, "cause unknown, a person decided"),
    ],
)
def test_an_unknown_cause_is_no_contradiction(verdict: dict[str, Any], line: str) -> None:
    """Plain words: what is known, and of what it is how sure (A11.1)."""
    assert verdict_summary(NONE | verdict) == line
