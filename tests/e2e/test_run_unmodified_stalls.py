"""A script that says nothing of itself: what torch's own threads say of it decides."""

from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS
from tests.waiting import until

START_WITHIN_S = 60.0
LIMIT_S = 8.0
SEEN_WITHIN_S = 150.0


def ranks(cluster: Cluster) -> dict[int, Any]:
    """How its ranks are, as their beats say."""
    items = cluster.api.get(f"jobs/{cluster.job}/ranks")["items"]
    return {one["rank"]: one for one in items}


@pytest.mark.timeout(600)
def test_collectives_are_progress_and_who_is_missing_in_one_is_named(cluster: Cluster) -> None:
    """A rank that never joins a collective is found, with its place (A3.2)."""
    script = (str(SCRIPTS / "unmodified.py"), str(cluster.folder), f"{1.5 * LIMIT_S:g}")
    limits = ("--limit", f"outside={LIMIT_S:g}", "--limit", "first-step=120")
    patient = {"EVERSTEP_AGENT__INTERPRETER_WITHIN_S": "30"}  # on a busy machine, too
    cluster.run("--nproc-per-node", "2", *limits, *script, **patient)
    cluster.until_stepping(1, START_WITHIN_S)

    # For longer than the limit nothing but collectives: by their pages both would have stalled.
    until(
        (cluster.folder / "evaluating").exists,
        "they do that for longer than their limit",
        within_s=SEEN_WITHIN_S,
    )
    evaluating = ranks(cluster)
    assert [evaluating[rank]["state"] for rank in (0, 1)] == ["running", "running"]
    assert [evaluating[rank]["step"] for rank in (0, 1)] == [1, 1]
    assert max(one["progress_age_s"] for one in evaluating.values()) < LIMIT_S
    assert cluster.facts("rank_stalled") == []
    counts = {rank: one["collectives"] for rank, one in evaluating.items()}
    assert min(counts.values()) > LIMIT_S  # many a second, on any machine
    until(
        lambda: ranks(cluster),
        "beats say that they enter more",
        holds=lambda now: all(now[rank]["collectives"] > counts[rank] for rank in counts),
    )

    (cluster.folder / "hang").touch()
    stall = cluster.until_fact("rank_stalled", within_s=SEEN_WITHIN_S)
    assert (stall["rank"], stall["phase"], stall["signal"]) == (1, "step", "collectives")
    assert (stall["limit_s"], stall["limit_source"]) == (LIMIT_S, "configured")
    assert stall["waited_s"] >= LIMIT_S
    assert stall["blocked_in"].startswith("it sleeps")
    assert "in forget_the_others" in stall["blocked_in"]
    assert "collective" not in stall["blocked_in"]

    cluster.until_stepping(2, START_WITHIN_S)
    (cluster.folder / "end").touch()
    cluster.until_done()
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["rank"]) == ("rank_stalled", 1)
    waiting = [one for one in cluster.facts("rank_stalled") if one["rank"] == 0]
    assert all("it is in the collective gloo:broadcast" in one["blocked_in"] for one in waiting)
