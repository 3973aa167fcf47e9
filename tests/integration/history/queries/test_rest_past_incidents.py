"""The story of an incident whose round went on: nothing that came later is part of the story."""

from datetime import timedelta
from typing import Any

import httpx2

from everstep.messages import Fact
from tests.integration.conftest import Api
from tests.unit.history.facts import BEGAN, make


def about(kind: str, second: float, **more: Any) -> Fact:
    """A fact of round 1 of job `j`."""
    at = BEGAN + timedelta(seconds=second)
    return make(kind, job="j", round=1, at=at, **more)


async def test_how_ranks_end_after_an_incident_is_no_part_of_it(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A rank moved again, or restarted in its process, and was done minutes later (A11.1)."""
    stall = about("rank_stalled", 10, rank=1, step=286)
    later = about("rank_stalled", 60, rank=0)
    await api.add(
        stall,
        about("incident_opened", 11, incident="i", trigger="rank_stalled", rank=1),
        about("stall_located", 12, first_ranks=(1,)),
        about("rank_recovered", 30, rank=1, stall=stall.id),
        about("incident_closed", 31, incident="i", outcome="recovered", next_round=1,
              trigger="rank_stalled", rank=1),
        about("stall_located", 59, first_ranks=(0,)),
        later,
        about("rank_exited", 90, rank=1, how="done", exit_code=0, step=629),
        about("rank_exited", 91, rank=0, how="exit", exit_code=1),
    )  # fmt: skip
    incident = (await reader.get("jobs/j/incidents/i")).json()
    assert (incident["primary"], incident["exits"]) == (None, [])
    assert [it["id"] for it in incident["stalls"]] == [stall.id]
    assert (incident["stall"]["step"], incident["located"]["first_ranks"]) == (286, [1])
