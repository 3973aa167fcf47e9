"""The dashboard over HTTP: every page has its facts, and nobody gets more than REST gives."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest

from everstep.clock import SystemClock
from everstep.messages import ControlDocument, encode
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep.store.tokens import Scope
from everstep.subjects import CLUSTER
from everstep_services.history.dashboard import rest
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import opened
from tests.integration.history.dashboard.fleet_facts import JOB, KILLED, STALLED, node
from tests.integration.history.served_story import ServedStory
from tests.unit.history.facts import make

BASE = "http://everstep.test"
OURS = {"Origin": BASE, "Content-Type": "application/x-www-form-urlencoded"}
PAGES = {
    "/": ("What needs a person", "diffusion-xl-512 failed", "gpu-018 is unhealthy", "Goodput"),
    "/jobs": (JOB, "moe-8x7b-sft", "team:llm"),
    "/jobs?state=failed": ("diffusion-xl-512",),
    f"/jobs/{JOB}": ("Where the time went", "Lost steps", "k-stall", "ran out of memory",
                      "median of a minute", "p99, worst minute", "Done", "of 100\u202f000",
                      "loss", "grad_norm"),
    f"/jobs/{JOB}/ranks": ("gpu-016", "71 GiB", "heat-map"),
    f"/jobs/{JOB}/ranks?rank=93": ("Rank 93", "31 % above"),
    f"/jobs/{JOB}/logs": ("step 57499", "ansi-green", "16 ranks on 2 nodes", "UserWarning"),
    f"/jobs/{JOB}/logs?find=NaN": ("<mark>NaN</mark>", "1 line"),
    "/jobs/moe-8x7b-sft/logs": ("everstep run --store-logs", "store_logs = true"),
    f"/jobs/{JOB}/stragglers": ("device", "24 % above the median", "straggler", "observed"),
    f"/jobs/{JOB}/checkpoints": ("57\u202f500", "quarantined", "survives 2", "pinned"),
    f"/jobs/{JOB}/checkpoints/holders?step=57500&tier=peer": ("is held by", node(1)),
    "/incidents": ("hung in section data", "user code"),
    f"/incidents/{KILLED}": ("out of memory", "a person must act first", "CUDA out of memory",
                             "Restore", "never joined", "Where the time went"),
    f"/incidents/{STALLED}": ("storage", "nfs4_wait_bit_killable", "5 min"),
    "/nodes": (node(18), "unhealthy", "NVIDIA H100", "14 uncorrectable", "2 run"),
    f"/nodes/{node(0)}": ("checks that run while ranks train", "excludes the node"),
    f"/nodes/{node(18)}": ("ECC_DBE", "Excluded by"),
    "/facts": ("progress_made", "agent/gpu-000", "is saved in the tier global", "ms a step"),
    "/facts?kind=incident_opened": ("rank 21 on gpu-002",),
    "/control": ("Every job", "Pull the brake", "sqlite"),
    f"/do/stop?job={JOB}": ("Stop the job", "to confirm"),
}  # fmt: skip


class Dangerous(HTMLParser):
    """Finds what a browser would execute, or that no page of ours has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and not (given.get("src") or "").startswith("/static/"):
            self.found.append("an inline script")
        if tag in {"style", "iframe", "object", "embed", "base"}:
            self.found.append(f"a {tag}")
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.found.append(f"{tag} {name}")
            if name in {"href", "src", "action"} and not (value or "").startswith("/"):
                self.found.append(f"{tag} {name}={value}")


def dangerous(page: str) -> list[str]:
    parser = Dangerous()
    parser.feed(page)
    return [one for one in parser.found if one != "a href=#main"]


@asynccontextmanager
async def fleet(folder: Path, scope: Scope = "read") -> AsyncIterator[tuple[Api, Any]]:
    """A fleet, and a client that is logged in."""
    async with opened(folder) as api:
        client = browser(api)
        await log_in(client, await api.token(scope))
        yield api, client


def browser(api: Api) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=api.app, client=("10.0.0.1", 1234))
    return httpx2.AsyncClient(transport=transport, base_url=BASE)


async def log_in(client: httpx2.AsyncClient, token: str) -> httpx2.Response:
    return await client.post("/login", content=urlencode({"token": token}), headers=OURS)


async def test_a_token_that_only_reads_is_offered_no_action(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (_, client):
        for path in PAGES:
            if not path.startswith("/do/"):
                assert "/do/" not in (await client.get(path)).text, path


async def test_every_page_has_its_facts_and_strict_headers(tmp_path: Path) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        for path, texts in PAGES.items():
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            assert [text for text in texts if text not in answer.text] == [], path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(
                r"<script(?! src=\"/static/)|<style|\son[a-z]+=|\sstyle=", answer.text
            )


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


def key_of(page: str) -> str:
    found = re.search(r'name="key" value="([0-9a-f]{32})"', page)
    assert found is not None
    return found[1]


async def test_an_action_needs_our_form_the_typed_name_and_the_scope(tmp_path: Path) -> None:
    """CSRF, a wrong confirmation and a token that only reads each end with nothing done (A13.1)."""
    async with fleet(tmp_path) as (api, client):
        page = (await client.get(f"/do/stop?job={JOB}")).text
        form = {"key": key_of(page), "job": JOB, "reason": "a test", "confirmed": JOB}

        async def sent(headers: dict[str, str] = OURS, **more: str) -> tuple[int, str]:
            answer = await client.post("/do/stop", content=urlencode(form | more), headers=headers)
            return answer.status_code, answer.text

        assert (await sent({**OURS, "Origin": "http://evil.test"}))[0] == 403
        assert (await sent({**OURS, "Sec-Fetch-Site": "cross-site"}))[0] == 403
        assert (await sent(key="0" * 32))[0] == 403
        assert (await sent(confirmed="another"))[0] == 422
        status, text = await sent()
        assert status == 403
        assert "needs a token with the scope operate" in text
        assert api.bus is not None


async def test_what_is_asked_on_a_page_goes_the_way_of_rest(tmp_path: Path) -> None:
    """Rendezvous hears who asked and why, and its answer is shown."""
    from everstep.messages import Done, Message

    heard: list[Message] = []

    async def save(question: Message) -> Message:
        heard.append(question)
        return Done(text="step 57 900 is saved")

    async with fleet(tmp_path, "operate") as (api, client):
        page = (await client.get(f"/do/save?job={JOB}")).text
        form = {"key": key_of(page), "job": JOB, "reason": "before the weekend", "confirmed": JOB}
        async with api.bus.answer("rendezvous", {"save": save}):
            answer = await client.post("/do/save", content=urlencode(form), headers=OURS)
        assert answer.status_code == 200, answer.text
        assert "step 57 900 is saved" in answer.text
        (question,) = heard
        assert (question.job, question.reason, question.by, question.origin) == (  # type: ignore[attr-defined]
            JOB, "before the weekend", "a operate", "rest",
        )  # fmt: skip


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "bell \x07 escape \x1b[31m bidi \u202e nul",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", HOSTILE)
async def test_text_from_the_bus_executes_nothing(tmp_path: Path, text: str) -> None:
    """Labels, reasons, exception texts, log lines, texts of nodes: the page stands (A13.3)."""
    async with open_database(f"sqlite:///{tmp_path / 'h.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), SystemClock())
        await api.open()
        await api.add(*hostile_facts(text))
        client = browser(api)
        await log_in(client, await api.token("read"))
        for path in ("/", "/jobs", "/jobs/j", "/jobs/j/checkpoints", "/jobs/j/stragglers",
                     "/incidents", "/incidents/i1", "/nodes", "/nodes/n1", "/facts",
                     "/jobs?q=" + urlencode({"": text[:100]})[1:]):  # fmt: skip
            answer = await client.get(path)
            assert answer.status_code in {200, 422}, (path, answer.text[:2000])
            assert dangerous(answer.text) == [], path
            assert "\x1b" not in answer.text
            assert "\u202e" not in answer.text


def hostile_facts(text: str) -> list[Any]:
    from everstep.messages import ErrorRecord, JobSpec

    short = text[:500]
    error = ErrorRecord(name=short, text=text, traceback=text, place=short, chain=(short,))
    spec = JobSpec(name=short, labels={short[:100]: short}, command=(text,), config_fingerprint="f",
                   nodes_min=1, nodes_max=1, ranks_per_node=1)  # fmt: skip
    return [
        make("job_started", spec=spec, user=short, allocation="a1"),
        make("node_joined", node="n1", address=short, device=short, version=short),
        make("round_formed", round=1),
        make("round_ended", round=1, reason=text, node="n1"),
        make("rank_exited", round=1, node="n1", error=error, incident="i1"),
        make("incident_opened", round=1, incident="i1", reason=text, node="n1", trigger=short),
        make("evidence_collected", incident="i1", node="n1", summary=text, missing=text),
        make("verdict_reached", incident="i1", reason=text, advice=text, explanation=text,
             is_inconclusive=False, missing=(text,)),
        make("action_decided", incident="i1", reason=text),
        make("node_suspected", node="n1", reason=text),
        make("node_check_finished", node="n1"),
        make("straggler_found", round=1, node="n1", reason=text),
        make("checkpoint_failed", round=1, node="n1", reason=text),
        make("job_ended", state="failed", reason=text),
    ]  # fmt: skip


async def test_a_job_that_ended_well_without_its_last_save_needs_a_person(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        await api.add(
            make("job_started", job="unsaved", round=None, at=datetime.now(UTC)),
            make("checkpoint_committed", job="unsaved", round=1, tier="global", step=420),
            make(
                "checkpoint_failed", job="unsaved", round=1, tier="global", step=600, reason="full"
            ),
            make("job_ended", job="unsaved", state="done", exit_code=0, at=datetime.now(UTC)),
        )
        page = (await client.get("/")).text
        lost = "its last save has failed: full; its newest checkpoint is step 420"
        assert f"unsaved has ended, and {lost}" in page


async def test_while_the_bus_is_away_a_banner_says_how_old_the_record_is(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        api.is_bus_connected = False
        page = (await client.get("/jobs")).text
        assert "The bus is away" in page
        assert JOB in page


async def test_a_page_does_not_wait_for_a_bus_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the loss is noticed, questions to the bus are cut short, and a banner tells it."""
    async with fleet(tmp_path) as (api, client):
        await client.get("/")

        async def wait_for_ever() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(rest, "_LIVE_WITHIN_S", 0.05)
        control = api.bus.documents("CONTROL")
        monkeypatch.setattr(control, "keys", wait_for_ever)
        monkeypatch.setattr(api.bus, "documents", lambda _: control)
        page = (await client.get("/")).text
        assert "The bus or a service does not answer in time." in page
        assert "The newest fact was written" in page
        assert "This page shows what was read" in page
        assert JOB in page


async def test_while_the_database_is_away_pages_show_what_they_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answers are shown with their age; what was never read is marked. No traceback."""
    from everstep.store.errors import DatabaseUnavailableError

    async with fleet(tmp_path) as (api, client):
        assert JOB in (await client.get("/jobs")).text

        def refuse(*_: object) -> None:
            raise DatabaseUnavailableError("sqlite", "no connection")

        monkeypatch.setattr(type(api.database), "read", refuse)
        page = await client.get("/jobs")
        assert page.status_code == 200
        assert JOB in page.text
        assert "This page shows what was read" in page.text
        other = await client.get("/incidents?node=n9")
        assert other.status_code == 503
        assert "Traceback" not in other.text


async def test_static_files_are_packed_and_kept_for_ever(tmp_path: Path) -> None:
    async with opened(tmp_path) as api:
        client = browser(api)
        page = (await client.get("/login")).text
        for url in re.findall(r'"(/static/[^"]+)"', page):
            answer = await client.get(url)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
            assert answer.headers["content-encoding"] == "gzip"
        assert (await client.get("/static/site.py")).status_code == 404


@pytest.mark.parametrize("path", ["/jobs/nope", "/incidents/nope", "/nodes/nope", "/facts/zzz"])
async def test_a_page_that_is_not_there_says_nothing_of_the_database(
    tmp_path: Path, path: str
) -> None:
    async with fleet(tmp_path) as (_, client):
        answer = await client.get(path)
        assert answer.status_code in {404, 422}
        assert "cannot be read" not in answer.text


@pytest.mark.parametrize(
    "path", ["/jobs/a%20b", "/nodes/%2e%2e", "/do/stop?job=nope", "/do/exclude?node=nope"]
)
async def test_what_cannot_be_there_is_a_page_that_is_not_there(tmp_path: Path, path: str) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "There is no such page" in answer.text
        assert "pattern" not in answer.text


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


async def test_a_job_that_nobody_runs_any_more_needs_a_person(tmp_path: Path) -> None:
    """It gave up waiting for nodes: it is neither at work nor over (A11.2)."""
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        await api.add(
            make("job_started", job="given-up", at=now),
            make("allocation_started", job="given-up", allocation="a", at=now),
            make("allocation_ended", job="given-up", allocation="a", state="stopped",
                 reason="1 of 2 nodes joined within 60 s", at=now),
        )  # fmt: skip
        page = (await client.get("/")).text
    assert "given-up is not done, and no node runs it: 1 of 2 nodes joined within 60 s" in page


async def test_a_job_that_a_policy_stopped_needs_a_person_and_one_that_a_person_stopped_does_not(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        for job, cause in (("by-policy", "rank_failed"), ("by-ann", "operator")):
            await api.add(
                make("job_started", job=job, round=None, at=now),
                make("round_formed", job=job, round=1, at=now),
                make("round_ended", job=job, round=1, cause=cause, reason="x", at=now),
                make("job_ended", job=job, state="stopped", reason="restarts are spent", at=now),
            )
        page = (await client.get("/")).text
    assert "by-policy was stopped: restarts are spent" in page
    assert "by-ann was stopped" not in page


async def test_a_job_that_waits_long_for_nodes_needs_a_person(tmp_path: Path) -> None:
    """None of its ranks runs, and no round can form (A11.2)."""
    async with fleet(tmp_path) as (api, client):
        began = datetime.now(UTC)
        wait: dict[str, Any] = {
            "joined": 1,
            "needed": 2,
            "waited_s": 0.0,
            "limit_s": 600.0,
            "round": 2,
        }
        wait |= {"reason": "1 of 2 nodes are here", "missing": ("gone",)}
        for job, age in (("waits", timedelta(minutes=5)), ("restarts", timedelta(seconds=5))):
            ended = began - age
            await api.add(
                make("job_started", job=job, round=0, at=began - timedelta(hours=1)),
                make("round_formed", job=job, round=1, members=(), at=began - timedelta(hours=1)),
                make("round_ended", job=job, round=1, at=ended),
                make("round_waiting", job=job, at=ended, **wait),
            )
        page = (await client.get("/")).text
    assert "waits has waited for nodes for 5 min" in page
    assert "1 of 2 nodes are here" in page
    assert "restarts has waited" not in page


async def test_a_brake_that_is_on_can_be_released_on_the_first_page(tmp_path: Path) -> None:
    async with fleet(tmp_path, "operate") as (api, client):
        assert "Pull the brake" in (await client.get("/")).text
        braked = ControlDocument(
            settings={}, modes={}, changed_by="ann", reason="a storm", is_braked=True
        )
        await api.bus.documents("CONTROL").put(CLUSTER, encode(braked), revision=None)
        page = (await client.get("/")).text
        assert "Release the brake" in page
        assert "Pull the brake" not in page


@pytest.mark.parametrize("hours", ["nan", "inf", "-1", "1e308", "soon"])
async def test_hours_that_make_no_sense_exclude_nothing(tmp_path: Path, hours: str) -> None:
    async with fleet(tmp_path, "operate") as (_, client):
        form = await client.get("/do/exclude?node=gpu-001")
        given = {"node": "gpu-001", "reason": "x", "confirmed": "gpu-001", "hours": hours,
                 "key": key_of(form.text)}  # fmt: skip
        answer = await client.post("/do/exclude", content=urlencode(given), headers=OURS)
        assert answer.status_code == 422
        assert "hours is a number" in answer.text


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
