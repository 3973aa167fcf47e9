"""Torch compiles in the middle of a training, for longer than the limit of where it does."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS
from tests.waiting import until

SCRIPT = str(SCRIPTS / "compiling.py")
LIMIT_S = 5.0
WAITS_S = 15.0
"""A rank that merely waits has longer, so that the hanging one is found first in any order."""
START_WITHIN_S = 200.0
LIMITS = [
    word
    for name in (f"forward={LIMIT_S:g}", f"exchange={WAITS_S:g}", "first-step=600")
    for word in ("--limit", name)
]


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_rank_that_compiles_has_not_stalled_nor_have_those_that_wait(cluster: Cluster) -> None:
    """One rank compiles past its limit, and a real hang is found after it (A3.1)."""
    cluster.run("--nproc-per-node", "2", *LIMITS, SCRIPT, str(cluster.folder))
    until((cluster.folder / "compiles").exists, "rank 0 compiles", within_s=START_WITHIN_S)
    ranks = until(
        cluster.ranks,
        "both ranks have stood for longer than their limit",
        holds=lambda found: (
            min(one["progress_age_s"] or 0.0 for one in found.values()) > 1.5 * WAITS_S
        ),
        within_s=START_WITHIN_S,
    )
    assert [ranks[rank]["section"] for rank in (0, 1)] == ["forward", "exchange"]
    assert [ranks[rank]["state"] for rank in (0, 1)] == ["running", "running"]
    assert [ranks[rank]["limit_s"] for rank in (0, 1)] == [600, WAITS_S]
    assert cluster.facts("rank_stalled") == []
    step = ranks[0]["step"]

    (cluster.folder / "compiled").touch()
    until(cluster.ranks, "it goes on", holds=lambda found: found[0]["step"] > step)
    assert cluster.facts("rank_stalled") == []

    (cluster.folder / "hang").touch()
    stall = cluster.until_fact("rank_stalled")
    assert (stall["rank"], stall["phase"], stall["section"]) == (0, "section", "forward")
    assert (stall["limit_s"], stall["limit_source"]) == (LIMIT_S, "configured")
    cluster.until_stepping(2, START_WITHIN_S)
    (cluster.folder / "end").touch()
    cluster.until_done()
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 0)


IDLE_S = 10.0


@pytest.mark.variant
@pytest.mark.timeout(400)
def test_a_compilation_that_computes_nothing_has_hung(cluster: Cluster) -> None:
    limits = ("--limit", f"forward={LIMIT_S:g}", "--limit", "first-step=600")
    environ = {"EVERSTEP_AGENT__IDLE_COMPILE_S": f"{IDLE_S:g}"}
    cluster.run("--nproc-per-node", "2", *limits, SCRIPT, str(cluster.folder), **environ)
    stall = cluster.until_fact("rank_stalled", within_s=START_WITHIN_S)
    (cluster.folder / "compiled").touch()
    assert (stall["rank"], stall["phase"], stall["section"]) == (0, "compile", "forward")
    assert stall["limit_s"] == LIMIT_S
    assert stall["waited_s"] >= LIMIT_S + max(IDLE_S, 3 * LIMIT_S)
    cluster.until_stepping(2, START_WITHIN_S)
    (cluster.folder / "end").touch()
    cluster.until_done()
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 0)
    assert "has computed next to nothing for" in incident["reason"]
