"""Who is admitted to the dashboard: tokens, cookies, links and codes, and nobody else."""

import json
from pathlib import Path
from urllib.parse import urlencode

import httpx2
import pytest

from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import opened
from tests.integration.history.dashboard.fleet_facts import JOB, KILLED
from tests.integration.history.dashboard.visitors import OURS, browser, fleet, log_in
from tests.integration.history.served_story import ServedStory


async def test_nobody_sees_a_page_without_a_token(tmp_path: Path) -> None:
    """A link leads to the login and back; data and streams are refused."""
    async with opened(tmp_path) as api:
        client = browser(api)
        answer = await client.get("/jobs?state=failed")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login?next=/jobs%3Fstate%3Dfailed"
        for path in (f"/jobs/{JOB}/heat", "/live", f"/incidents/{KILLED}.md"):
            assert (await client.get(path)).status_code == 401, path
        assert (await log_in(client, "evs_nobody_knows")).status_code == 401
        assert (await log_in(client, "a\nb")).status_code == 200
        assert not client.cookies


async def test_the_session_is_a_cookie_that_no_script_and_no_other_site_can_use(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as api:
        client = browser(api)
        token = await api.token("read")
        answer = await log_in(client, token)
        cookie = answer.headers["set-cookie"].lower()
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        elsewhere = await client.post(
            "/login?next=//evil.test/", content=urlencode({"token": token}), headers=OURS
        )
        assert elsewhere.headers["location"] == "/"
        foreign = {**OURS, "Origin": "http://evil.test"}
        refused = await client.post("/login", content=urlencode({"token": token}), headers=foreign)
        assert refused.status_code == 403


async def test_a_link_from_another_site_is_asked_once_more_by_ours(tmp_path: Path) -> None:
    """The cookie is not sent along such a link, though its owner is logged in."""
    async with opened(tmp_path) as api:
        answer = await browser(api).get("/jobs?q=a", headers={"Sec-Fetch-Site": "cross-site"})
        assert 'content="0;url=/jobs?q=a"' in answer.text


async def test_a_token_for_notices_alone_opens_no_page(tmp_path: Path) -> None:
    """Its scope is `webhook`; a page without data would say that all is well (A13.1)."""
    async with opened(tmp_path) as api, browser(api) as client:
        token = await api.token("webhook")
        refused = await log_in(client, token)
        assert (refused.status_code, "sends notices" in refused.text) == (403, True)
        answer = await client.get("/", headers={"Cookie": f"everstep={token}"})
        assert answer.status_code == 403
        assert "Your token does not allow this" in answer.text
        assert "What needs a person" not in answer.text


async def test_paths_of_rest_are_as_they_were(tmp_path: Path) -> None:
    """A session opens no path of REST, and REST refuses everything that is not a page."""
    async with fleet(tmp_path) as (_, client):
        assert (await client.get("/api/v1/jobs")).status_code == 401
        assert (await client.get("/nothing")).status_code == 401


async def test_a_link_with_a_code_logs_in_once_and_for_a_minute(tmp_path: Path) -> None:
    """`everstep open` makes it over REST; the second use, and a late one, log nobody in."""
    async with opened(tmp_path) as api:
        token = await api.token("read")
        rest = {"Authorization": f"Bearer {token}"}
        made = await browser(api).post("/api/v1/login-codes", json={}, headers=rest)
        assert made.status_code == 201
        client, other = browser(api), browser(api)
        looked_at = await other.head(made.json()["path"])  # as programs that show previews do
        assert (looked_at.status_code, dict(other.cookies)) == (200, {})
        first = await client.get(made.json()["path"] + "&next=/jobs")
        assert (first.status_code, first.headers["location"]) == (303, "/jobs")
        assert (await client.get("/jobs")).status_code == 200
        again = await other.get(made.json()["path"])
        assert "was used" in again.text
        assert not other.cookies
        assert (await other.post("/api/v1/login-codes", json={})).status_code == 401


async def test_a_code_of_one_replica_logs_in_at_another(tmp_path: Path) -> None:
    """Behind a load balancer, the browser may come to any of them."""
    async with opened(tmp_path) as api:
        other = Api(api.database, api.fact_log, api.clock)
        await other.open()
        rest = {"Authorization": f"Bearer {await api.token('read')}"}
        made = await browser(api).post("/api/v1/login-codes", json={}, headers=rest)
        client = browser(other)
        first = await client.get(made.json()["path"])
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert (await client.get("/jobs")).status_code == 200
        assert "was used" in (await browser(api).get(made.json()["path"])).text


def test_everstep_open_prints_the_link_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServedStory(tmp_path) as served:
        code, out, err = served.command(capsys)("open", "llama-8b", "--link", "-o", "json")
        assert (code, err) == (0, "")
        link = json.loads(out)["link"]
        with httpx2.Client() as client:
            answer = client.get(link)
            assert answer.status_code == 303
            assert answer.headers["location"] == "/jobs/llama-8b"
