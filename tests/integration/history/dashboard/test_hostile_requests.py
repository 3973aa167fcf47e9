"""What strangers and guessers may try on the dashboard and REST: no file, no login, no 5xx."""

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import httpx2
import pytest

from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.projections.fold import fold
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.integration.history.dashboard.visitors import OURS, browser, log_in
from tests.unit.history.story import INCIDENT, JOB, whole

TRAVERSALS = (
    "/static/../../../../etc/passwd",
    "/static/%2e%2e/%2e%2e/etc/passwd",
    "/static/..%2f..%2f..%2fetc%2fpasswd",
    "/static//etc/passwd",
    "/static/everstep.css%00.svg",
    "/..%2f..%2fetc%2fpasswd",
    "/jobs/..%2f..%2fetc%2fpasswd",
    "/jobs/%2e%2e",
    f"/jobs/{JOB}/..%2f..%2ftokens",
    f"/incidents/{INCIDENT}/evidence/..%2f..%2f..%2fetc%2fpasswd",
    f"/incidents/..%2f{INCIDENT}.md",
    "/nodes/..%2f..%2fetc%2fpasswd",
    "/facts/..%2f..%2ftokens",
    "/do/..%2f..%2fstop",
    "/login?next=//evil.test",
    "/login?next=https:%2f%2fevil.test",
    "/api/v1/jobs/..%2f..%2ftokens",
    "/api/v1/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    f"/api/v1/incidents/{INCIDENT}/evidence/..%2f..%2fetc%2fpasswd",
    f"/api/v1/jobs/{JOB}/rounds/1/ranks/..%2f..%2fetc%2fpasswd/log",
    f"/api/v1/jobs/{JOB}/rounds/1/ranks/0/log?file=..%2f..%2fetc%2fpasswd",
)


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_database(f"sqlite:///{tmp_path / 'h.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), FakeClock())
        await api.open(failed_logins_per_minute=5)
        await api.add(*whole())
        yield api


@pytest.mark.parametrize("path", TRAVERSALS)
async def test_no_path_leads_to_a_file_or_to_another_site(told: Api, path: str) -> None:
    """A13.3."""
    token = await told.token("read")
    async with browser(told) as client:
        await log_in(client, token)
        for headers in ({}, {"Authorization": f"Bearer {token}"}):
            answer = await client.get(httpx2.URL(f"http://everstep.test{path}"), headers=headers)
            assert answer.status_code < 500, answer.text
            assert "root:" not in answer.text
            assert "secret_sha256" not in answer.text
            assert "evil.test" not in answer.headers.get("location", "")
            assert answer.headers["x-frame-options"] == "DENY"
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


async def test_whoever_guesses_tokens_in_the_form_is_slowed_down(told: Api) -> None:
    """As by REST: five a minute here; a right token is admitted all the same (A13.1)."""
    async with browser(told) as client:
        bad = "evs_000000000000_" + "0" * 64
        codes = [(await log_in(client, bad)).status_code for _ in range(8)]
        assert codes == [401] * 5 + [429] * 3
        assert not client.cookies
        assert (await log_in(client, await told.token("admin"))).status_code == 303


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (urlencode({"token": "x" * 100_000}), 413),
        ("&".join(f"a{i}=1" for i in range(5000)), 400),
        ("token=%ff%fe%00", 200),
        ("token=" + "%0d%0aSet-Cookie:%20a=b", 401),
        ("", 200),
    ],
)
async def test_a_form_of_any_size_and_kind_is_answered(told: Api, body: str, status: int) -> None:
    """Nothing of it is a header, and no 5xx (A13.3)."""
    async with browser(told) as client:
        answer = await client.post("/login", content=body, headers=OURS)
    assert answer.status_code == status
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "cookie", ["everstep=", "everstep=a\tb", "everstep=" + "x" * 12_000, "everstep=evs_x", ";;;="]
)
async def test_a_cookie_that_is_no_token_leads_to_the_login(told: Api, cookie: str) -> None:
    """A13.1."""
    async with browser(told) as client:
        for path in ("/", "/jobs", f"/incidents/{INCIDENT}"):
            answer = await client.get(path, headers={"Cookie": cookie})
            assert answer.status_code in {303, 429}, path
            assert JOB not in answer.text
