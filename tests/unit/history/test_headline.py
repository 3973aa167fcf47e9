"""Whether a verdict names others than the first report, and what a person reads first."""

import pytest

from everstep_services.history.api.dto.answer import culprit_sentence, names_others
from everstep_services.history.api.dto.incidents import headlines
from everstep_services.history.api.dto.jobs import shown_round

WHO = [
    ((1,), (), 0, "n1", True),  # a victim reported first
    ((1,), (), 1, "n1", False),
    ((0, 1), (), 0, "n1", True),  # two failed by themselves, and one was reported
    ((1,), ("n1",), None, "n1", False),
    ((1,), (), None, "n1", True),
    ((1,), (), None, None, True),
    ((), ("n2",), 0, "n1", True),
    ((), ("n1",), 0, "n1", False),
    ((), ("n1",), None, None, True),
    ((), (), 0, "n1", True),  # the verdict names nobody: the reported rank is a victim
    ((), (), None, None, False),
]


@pytest.mark.parametrize(("ranks", "nodes", "rank", "node", "are_others"), WHO)
def test_a_verdict_names_others_than_the_first_report(
    ranks: tuple[int, ...],
    nodes: tuple[str, ...],
    rank: int | None,
    node: str | None,
    are_others: bool,
) -> None:
    """A11.1: only then does the verdict take the place of the first report."""
    assert names_others(ranks, nodes, rank, node) is are_others


def test_an_injected_fault_is_told_as_that_although_the_report_named_its_rank() -> None:
    """A11.1: who reads a list looks for no failure where somebody made a test."""
    report = {"story": None, "reason": "rank 1 was ended by SIGKILL", "outcome": None, "rank": 1,
              "node": "n1", "culprit_ranks": [1], "culprit_nodes": [], "is_inconclusive": False,
              "cause": "injected", "injected_by": None,
              "verdict_reason": "injected by ann: SIGKILL of rank 1"}  # fmt: skip
    assert headlines(report) == {
        "headline": "injected by ann: SIGKILL of rank 1; rank 1 was ended by SIGKILL",
        "first_report": None,
    }
    assert headlines({**report, "cause": "unknown"})["headline"] == report["reason"]
    by_agent = "rank 1 was ended by SIGKILL, after ann injected kill"
    told_by_agent = {**report, "reason": by_agent, "injected_by": "ann"}
    assert headlines(told_by_agent)["headline"] == by_agent
    ended = {**report, "culprit_ranks": "[1]", "culprit_nodes": "[]",
             "end_reason": "no restart is left", "end_rank": 1, "end_node": "n1"}  # fmt: skip
    told = "injected by ann: SIGKILL of rank 1; no restart is left"
    assert shown_round(ended)["end_headline"] == told


SENTENCES = [
    ("rank 1 alone has not ended", (1,), (), "rank 1 alone has not ended"),
    ("ranks 0, 1 raised KeyError", (1,), (), "ranks 0, 1 raised KeyError"),
    ("2 ranks (0, 12) raised KeyError", (12,), (), "2 ranks (0, 12) raised KeyError"),
    ("rank 12 exited with 1", (1,), (), "rank 1: rank 12 exited with 1"),
    ("every rank raised KeyError", (0, 1), (), "every rank raised KeyError"),
    ("exited with 1", (1, 3), (), "ranks 1, 3: exited with 1"),
    ("ann says: the switch", (), ("n1",), "node n1: ann says: the switch"),
    ("n1: Xid 79", (), ("n1",), "n1: Xid 79"),
    ("n12: Xid 79", (), ("n1",), "node n1: n12: Xid 79"),
    ("sizes differ", (), (), "sizes differ"),
    ("it was all", tuple(range(9)), (), "ranks 0, 1, 2, 3, 4, 5 and 3 more: it was all"),
]


@pytest.mark.parametrize(("reason", "ranks", "nodes", "sentence"), SENTENCES)
def test_the_sentence_names_a_culprit(
    reason: str, ranks: tuple[int, ...], nodes: tuple[str, ...], sentence: str
) -> None:
    """A11.1: who reads the first words knows whom they are about."""
    assert culprit_sentence(reason, ranks, nodes) == sentence
