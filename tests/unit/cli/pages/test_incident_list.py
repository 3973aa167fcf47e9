"""The list of incidents names whom the verdict names, in the words of the headline."""

from typing import Any

import pytest

from everstep_services.cli.pages.jobs import INCIDENT_COLUMNS, _incident


def shown(**more: Any) -> dict[str, Any]:
    none = ("first_report", "culprit_ranks", "culprit_nodes", "opened_at", "closed_at", "ledger")
    first = {"incident": "0193aefc11e25f0a", "outcome": "failed", "rank": 0, "node": "n0",
             "reason": "rank 0, perhaps because of another rank, exited with 1"}  # fmt: skip
    record = {**dict.fromkeys(none), **first, "headline": first["reason"], **more}
    listed = _incident(record, 12)
    return {column: listed.get(column) for column in INCIDENT_COLUMNS}


@pytest.mark.parametrize(
    ("ranks", "nodes", "rank", "node"),
    [
        ([1], None, [1], None),
        ([1], [], [1], ["n2"]),
        ([1, 3], ["n1"], [1, 3], ["n1"]),
        (None, ["n1"], None, ["n1"]),
        (None, None, None, None),  # the verdict names nobody: the reported rank is a victim
    ],
)
def test_once_there_is_a_verdict_the_list_shows_whom_it_names(
    ranks: list[int] | None, nodes: list[str] | None, rank: object, node: object
) -> None:
    """A11.1: the rank that reports first is often a victim."""
    row = shown(
        first_report="rank 0 exited with 1", headline="rank 1 had ended with code 0",
        culprit_ranks=ranks, culprit_nodes=nodes,
        culprit_rank_nodes=None if nodes is None else ["n2"],
    )  # fmt: skip
    assert (row["rank"], row["node"]) == (rank, node)
    assert row["headline"] == "rank 1 had ended with code 0"


def test_a_node_that_only_the_sentence_of_the_verdict_names_is_listed() -> None:
    """Of a warden that ended, nobody is the culprit."""
    named = shown(first_report="rank 0 ended", headline="the warden of n0, the parent of its ranks")
    assert (named["rank"], named["node"]) == (None, ["n0"])
    other = shown(first_report="rank 0 ended", headline="the warden of n01 has ended")
    assert other["node"] is None


def test_before_the_verdict_and_where_it_agrees_the_first_report_is_listed() -> None:
    for agreed in (None, [0]):
        row = shown(culprit_ranks=agreed)
        assert (row["rank"], row["node"]) == (0, "n0")
        assert row["headline"].startswith("rank 0, perhaps")
