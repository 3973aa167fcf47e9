"""Every page of the dashboard: its facts, its headers, and text that executes nothing."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from everstep.clock import SystemClock
from everstep.incident_outcomes import INCIDENT_FATES
from everstep.job_states import NODE_PRESENCES
from everstep.messages.facts.incidents import Ledger
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import opened
from tests.integration.history.dashboard.fleet_facts import (
    JOB,
    KILLED,
    OPEN,
    STALLED,
    UNRIGHT,
    node,
)
from tests.integration.history.dashboard.visitors import browser, fleet, log_in
from tests.unit.history.facts import make

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
    f"/incidents/{KILLED}": ("out of memory", "or it may come again", "CUDA out of memory",
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


HTML = "text/html; charset=utf-8"


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


def choices(page: str, name: str) -> tuple[list[str], list[str]]:
    """The choices of a filter, and those that are selected."""
    select = re.search(rf'<select name="{name}">(.*?)</select>', page, re.DOTALL)
    assert select is not None
    options = re.findall(r"<option([^>]*)>([^<]*)</option>", select[1])
    return [text for _, text in options], [text for more, text in options if "selected" in more]


async def test_incidents_are_filtered_by_one_of_their_outcomes(tmp_path: Path) -> None:
    """Each outcome can be chosen, and the choice stands in the URL."""
    async with fleet(tmp_path) as (_, client):
        everything = (await client.get("/incidents")).text
        assert choices(everything, "outcome") == (["any", *INCIDENT_FATES], [])
        listed: dict[str, set[str]] = {}
        for outcome in INCIDENT_FATES:
            page = (await client.get(f"/incidents?outcome={outcome}")).text
            assert choices(page, "outcome")[1] == [outcome]
            listed[outcome] = set(re.findall(r'href="/incidents/([^"?]+)"', page))
        assert listed["recovered"] > {KILLED, STALLED, UNRIGHT}
        assert listed["failed"] == {OPEN}
        assert listed["merged"] == set()
        newer = (await client.get("/incidents?outcome=%3Cb%3Enew")).text  # by another release
        assert choices(newer, "outcome")[1] == ["&lt;b&gt;new"]
        assert "No incident matches these filters." in newer


async def test_nodes_are_filtered_by_their_state(tmp_path: Path) -> None:
    """The choice stands in the URL, and the table has the nodes that REST lists."""
    async with fleet(tmp_path) as (api, client):
        await api.add(make("node_lost", job=JOB, node=node(3)))
        await api.add(make("node_left", job=JOB, node=node(4)))
        rest = api.client(await api.token("read"))
        for state in NODE_PRESENCES:
            page = (await client.get(f"/nodes?state={state}")).text
            assert choices(page, "state") == (["any", *NODE_PRESENCES], [state])
            answer = await rest.get(f"nodes?state={state}&sort=strikes&order=desc&limit=50")
            nodes = [one["node"] for one in answer.json()["items"]]
            assert nodes
            rows = page.split('id="matrix"')[0]
            assert re.findall(r'<tr><td><a href="/nodes/([^"]+)"', rows) == nodes
        await rest.aclose()


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


async def test_an_address_of_no_page_is_a_page_for_browsers_only(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        for path in ("/nope", "/jobs/a/b/c", "/runbooks/nope"):
            answer = await client.get(path, headers={"Accept": "text/html,*/*"})
            assert (answer.status_code, answer.headers["content-type"]) == (404, HTML), path
            assert "There is no such page" in answer.text
        for path, accepts in (("/nope", "*/*"), ("/api/v1/nope", "text/html")):
            answer = await client.get(path, headers={"Accept": accepts})
            assert answer.headers["content-type"] == "application/problem+json", path
        answer = await browser(api).get("/nope", headers={"Accept": "text/html"})
        assert answer.headers["location"] == "/login?next=/nope"


async def test_an_incident_shows_its_weightiest_claims_its_culprit_and_its_runbook(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as (_, client):
        page = (await client.get(f"/incidents/{KILLED}")).text
        weights = [float(text) for text in re.findall(r"weight ([-0-9.]+)", page)]
        assert weights == sorted(weights, key=abs, reverse=True)
        assert len(weights) > 2
        assert "Could have decided" in page
        opened = re.findall(r"<details( open)?><summary>(Rank \d+|\d+ ranks) ", page)
        assert opened == [(" open", "Rank 21"), ("", "127 ranks")]
        (link,) = re.findall(r'href="(/runbooks/[^"]+)"', page)
        assert "<h2>Do</h2>" in (await client.get(link)).text


async def test_a_stall_outside_of_all_sections_is_in_no_section_of_its_phases_name(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as api:
        client = browser(api)
        await log_in(client, await api.token("read"))
        for phase, told in (("step", ""), ("first_step", " (first step)")):
            stall = make("rank_stalled", job="j", round=1, phase=phase, section=None)
            about: dict[str, Any] = {"job": "j", "incident": phase, "trigger": "rank_stalled"}
            about["trigger_fact"] = stall.id
            await api.add(
                make("job_started", job="j"), stall, make("incident_opened", round=1, **about)
            )
            page = (await client.get(f"/incidents/{phase}")).text
            assert f"<dt>Section</dt><dd>outside of all sections{told}</dd>" in page


async def test_pages_tell_that_a_watched_stall_stands_until_it_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as api:
        client = browser(api)
        await log_in(client, await api.token("read"))
        about: dict[str, Any] = {"job": "j", "incident": "i", "trigger": "rank_stalled"}
        judged = make("verdict_reached", job="j", round=1, incident="i", is_inconclusive=True,
                      reason="inconclusive: too little")  # fmt: skip
        watch = make("action_decided", job="j", round=1, incident="i", mode="observe")
        await api.add(
            *(make(kind, job="j", round=None) for kind in ("job_started", "allocation_started")),
            *(make(kind, job="j", round=1) for kind in ("round_formed", "round_started")),
            make("incident_opened", round=1, reason="rank 5 stands", **about), judged, watch,
        )  # fmt: skip

        async def pages() -> list[str]:
            return [(await client.get(path)).text for path in ("/", "/jobs", "/jobs/j")]

        page = (await client.get("/incidents/i")).text
        assert ">rank 5 stands</h1>" in page
        assert "The round goes on" in page
        assert "everstep restart j" in page
        assert all("</span>stalled</span>" in text for text in await pages())
        await api.add(make("incident_closed", round=1, outcome="recovered", **about))
        assert "The round goes on" not in (await client.get("/incidents/i")).text
        assert not any("</span>stalled</span>" in text for text in await pages())


async def test_what_did_not_go_on_is_not_open_and_an_empty_restore_has_no_step(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as api:
        client = browser(api)
        await log_in(client, await api.token("read"))
        about: dict[str, Any] = {"job": "j", "incident": "i", "trigger": "node_left"}
        await api.add(
            make("job_started", job="j"),
            make("fresh_started", job="j", round=1),
            make("checkpoint_committed", job="j", round=1, tier="global"),
            make("incident_opened", round=1, **about),
            make("incident_closed", round=1, outcome="stopped", ledger=Ledger(), **about),
        )
        page = (await client.get("/incidents/i")).text
        assert ("The training has not gone on" in page, "incident is open" in page) == (True, False)
        for path, told in (("/jobs/j", "Found nothing to restore"),
                           ("/jobs/j/checkpoints", "Last restore: nothing was found")):  # fmt: skip
            assert told in (await client.get(path)).text


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
