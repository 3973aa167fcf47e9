"""What the first page lists as needing a person, and what it leaves out."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from everstep.messages import ControlDocument, JobStarted, encode
from tests.integration.history.dashboard.fleet_facts import JOB
from tests.integration.history.dashboard.visitors import fleet
from tests.unit.history.facts import make


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


async def test_what_somebody_did_on_purpose_needs_nobody(tmp_path: Path) -> None:
    """A job that its owner has interrupted, and an injected fault that is being recovered from."""
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        for job in ("interrupted", "tested"):
            await api.add(
                make("job_started", job=job, at=now),
                make("allocation_started", job=job, allocation="a", at=now),
            )
        await api.add(
            make("operator_acted", job="interrupted", by="the terminal of n0", target="n0",
                 action="interrupt", outcome="accepted", reason="SIGINT", at=now),
            make("allocation_ended", job="interrupted", allocation="a", state="stopped",
                 reason="n0 left last", at=now),
            make("incident_opened", job="tested", incident="t", reason="rank 3 was killed", at=now),
            make("verdict_reached", job="tested", incident="t", cause="injected", at=now,
                 confidence=0.9, reason="injected by ann: SIGKILL of rank 3", culprit_ranks=(3,)),
        )  # fmt: skip
        page = (await client.get("/")).text
    concerns = page.partition('id="concerns"')[2].partition("</section>")[0]
    assert "interrupted" not in concerns
    assert "tested" not in concerns
    assert "gpu-018 is unhealthy" in concerns


async def test_an_excluded_node_is_not_shown_as_healthy(tmp_path: Path) -> None:
    """Its checks may be good again while it is out."""
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        await api.add(make("node_check_finished", job=JOB, node="gpu-018", is_healthy=True, at=now))
        page = (await client.get("/nodes")).text
    row = page.partition(">gpu-018<")[2].partition("</tr>")[0]
    assert "checks: healthy" in row
    assert "</span>healthy<" not in row


async def test_the_brake_of_a_job_that_is_over_needs_nobody(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        braked = ControlDocument(
            settings={}, modes={}, changed_by="ann", reason="a storm", is_braked=True
        )
        await api.bus.documents("CONTROL").put("stormy", encode(braked), revision=None)
        await api.add(make("job_started", job="stormy", round=None, at=datetime.now(UTC)))
        told = "The brake is on for job stormy"
        assert told in (await client.get("/")).text
        await api.add(
            make("job_ended", job="stormy", state="stopped", exit_code=93, at=datetime.now(UTC))
        )
        assert told not in (await client.get("/")).text


async def test_a_job_that_a_policy_stopped_needs_a_person_and_one_that_a_person_stopped_does_not(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        for job, cause in (("by-policy", "rank_failed"), ("by-ann", "operator"), ("early", ""),
                           ("between", "node_lost"), ("refused", ""), ("again", "")):  # fmt: skip
            is_by_policy = job == "by-policy"
            outcome = "refused" if job == "refused" else "accepted"
            await api.add(
                make("job_started", job=job, round=None, at=now),
                make("allocation_started", job=job, at=now),
                *(make("round_formed", job=job, round=1, at=now) for _ in filter(None, [cause])),
                *(make("round_ended", job=job, round=1, cause=cause, reason="x", at=now)
                  for _ in filter(None, [cause])),
                make("operator_acted", job=job, action="stop_job", outcome=outcome, target="",
                     origin="service" if is_by_policy else "cli", reason="y", at=now),
                *(make("allocation_started", job=job, allocation="2", at=now)
                  for _ in filter("again".__eq__, [job])),
                make("job_ended", job=job, state="stopped", reason="restarts are spent", at=now),
            )  # fmt: skip
        page = (await client.get("/")).text
    stopped = set(re.findall(r"([a-z-]+) was stopped: restarts are spent", page))
    assert stopped == {"by-policy", "refused", "again"}


async def test_a_job_that_waits_long_for_nodes_needs_a_person(tmp_path: Path) -> None:
    """None of its ranks runs, and no round can form (A11.2), also while many others restart."""
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
        ages = {"waits": timedelta(minutes=5)}
        ages |= {f"restarts-{number}": timedelta(seconds=5) for number in range(25)}
        for job, age in ages.items():
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
    assert not re.search(r"restarts-\d+ has waited", page)


async def test_a_slow_rank_needs_a_person(tmp_path: Path) -> None:
    """It stands on the pages of the fleet and of its job."""
    async with fleet(tmp_path) as (_, client):
        page = (await client.get("/")).text
        of_job = (await client.get(f"/jobs/{JOB}")).text
    assert "Rank 93 on gpu-011 is slow (device)" in page
    assert "Rank 93 on gpu-011 is slow</a>" in of_job


async def test_a_job_whose_nodes_never_came_has_no_rounds_and_no_picture(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        now = datetime.now(UTC)
        began = now - timedelta(seconds=60)
        await api.add(
            make("job_started", job="never", at=began),
            make("allocation_started", job="never", allocation="a", at=began),
            make("round_ended", job="never", round=1, at=now),
            make("allocation_ended", job="never", allocation="a", state="failed", at=now),
        )
        assert (
            "As a table: 0 rounds, and one that never formed"
            in (await client.get("/jobs/never")).text
        )
        (row,) = re.findall(r"<tr>.*?/jobs/never.*?</tr>", (await client.get("/jobs")).text)
        assert '<td class="num">0</td>' in row
        assert (await client.get("/jobs/never/heat?measure=own")).status_code == 204


async def test_the_logs_of_a_watched_job_are_at_its_launcher(tmp_path: Path) -> None:
    """Neither --store-logs nor a command on the node would show them."""
    async with fleet(tmp_path) as (api, client):
        started = make("job_started", job="watched")
        assert isinstance(started, JobStarted)
        spec = replace(started.spec, labels={"launcher": "torchrun"})
        await api.add(replace(started, spec=spec))
        page = (await client.get("/jobs/watched/logs")).text
        assert "torchrun has started the ranks of this job, and has their output" in page
        assert "everstep logs watched" not in page


async def test_what_was_done_about_a_slow_rank_is_a_decision(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (api, client):
        acted = make(
            "straggler_acted", job="slow", round=1, action="stop", outcome="observed",
            reason="rank 3 costs 40 %",
        )  # fmt: skip
        await api.add(make("job_started", job="slow"), acted)
        page = (await client.get("/jobs/slow")).text
        assert "rank 3 costs 40 %" in page.partition('id="decisions"')[2]
        assert "only observed" in page
