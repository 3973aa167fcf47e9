"""Ranks that keep their states, as REST, `everstep why` and the dashboard tell it."""

from pathlib import Path

import httpx2
import pytest

from tests.integration.conftest import Api
from tests.integration.history.dashboard.visitors import browser, log_in
from tests.integration.history.served_story import ServedStory
from tests.unit.history.story import INCIDENT, JOB, begun, decided, healed, killed

FACTS = (*begun(), *killed(None), *decided(), *healed())
SENTENCE = "rank 2 was replaced, 3 kept their state"


async def test_rest_tells_what_became_of_all_ranks(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*FACTS)
    incident = (await reader.get(f"jobs/{JOB}/incidents/{INCIDENT}")).json()
    assert incident["ledger"]["heal_s"] == 0.12
    assert f"{SENTENCE}, 0 steps lost" in incident["headline"]
    assert incident["lost_steps"] == 0
    broken, next_ = incident["rounds"]
    assert (broken["healed"], broken["healed_kept"]) == (None, None)
    assert (next_["healed"], next_["healed_step"], next_["healed_kept"]) == (SENTENCE, 1010, 3)
    assert (next_["healed_at"], next_["healed_took_s"]) == ("2026-11-21T07:01:01.800000Z", 0.12)
    goodput = (await reader.get(f"jobs/{JOB}/goodput")).json()["seconds"]
    assert (goodput["heal"], goodput["restore"]) == (0.12, 0.0)


async def test_pages_of_the_job_and_of_the_incident_tell_it(api: Api) -> None:
    await api.add(*FACTS)
    client = browser(api)
    await log_in(client, await api.token("read"))
    page = (await client.get(f"/incidents/{INCIDENT}")).text
    assert f'<p class="note ok">{SENTENCE}, 0 steps lost.</p>' in page
    assert 'class="k-heal"' in page
    page = (await client.get(f"/jobs/{JOB}")).text
    assert "<small>3 kept</small>" in page


def test_why_tells_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with ServedStory(tmp_path, [*healed()]) as served:
        _, out, _ = served.command(capsys)("why", JOB)
    assert f"\n  {SENTENCE}, " in out
    assert "round 2 runs: 4 ranks, 3 kept, 4 warm" in out
