"""Metrics of jobs: what Prometheus reads of the record."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from operator import not_

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from everstep.messages import NodeBeat, ProbeBeat
from everstep_services.history.goodput.ledger import LedgerSegment
from everstep_services.history.goodput.reader import JobNews
from everstep_services.history.job_metrics import JobMetrics
from tests.integration.conftest import Api
from tests.unit.history.facts import make
from tests.unit.history.goodput_trace import BEGAN, SECONDS, TRACE, started
from tests.waiting import turns, until_async

Samples = dict[tuple[str, ...], float]


async def samples(api: Api) -> Samples:
    """Every sample, by its name and the values of its labels but the job's."""
    shown = JobMetrics(api.database, api.context.goodput, api.context.beats, api.clock)
    await shown.refresh()
    registry = CollectorRegistry()
    registry.register(shown)
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


async def test_a_job_shows_where_it_is_and_what_its_time_went_to(api: Api) -> None:
    """A11.4, A11.5."""
    await api.add(
        make("job_started", job="j", round=None, at=BEGAN), *TRACE[:-2],
        make("incident_opened", job="j", incident="i", at=BEGAN),
        make("verdict_reached", job="j", incident="i", cause="gpu", at=BEGAN),
        make("checkpoint_failed", job="j", round=1, tier="global", step=80, at=BEGAN),
    )  # fmt: skip
    found = await samples(api)
    assert found["everstep_job_step", "j"] == 7
    assert found["everstep_job_incidents_total", "gpu", "j"] == 1
    assert found["everstep_job_incidents_open", "j"] == 0
    assert found["everstep_job_stragglers", "j"] == 0
    assert found["everstep_job_checkpoint_failures_total", "j", "global"] == 1
    assert found["everstep_job_checkpoint_last_committed_step", "j", "global"] == 70
    assert found["everstep_job_checkpoint_stall_seconds", "j", "global"] == 2.0
    assert found["everstep_job_spent_seconds_total", "productive", "j"] == SECONDS["productive"]
    assert found["everstep_job_spent_seconds_total", "lost_steps", "j"] == SECONDS["lost_steps"]
    assert 0 < found["everstep_job_goodput_ratio", "j", "job"] < 1


async def test_steps_that_are_counted_anew_in_each_round_are_those_of_the_newest(api: Api) -> None:
    """Otherwise a script without the SDK stands still after a restart until it has caught up."""
    await api.add(
        make("job_started", job="j", round=None, at=BEGAN),
        make("round_formed", job="j", round=1, at=BEGAN),
        make("progress_made", job="j", round=1, step=1445, at=BEGAN),
        make("round_formed", job="j", round=2, at=BEGAN),
        make("progress_made", job="j", round=2, step=318, at=BEGAN),
    )
    assert (await samples(api))["everstep_job_step", "j"] == 318
    async with api.client(await api.token("read")) as client:
        assert (await client.get("/jobs/j")).json()["last_step"] == 318
    await api.add(make("round_formed", job="j", round=3, at=BEGAN))
    assert (await samples(api))["everstep_job_step", "j"] == 318, "round 3 has made no step yet"


async def test_failed_probes_are_counted_by_check_and_policy_and_never_by_node(api: Api) -> None:
    """A11.4: a probe that has not failed is 0, so that an alert ends."""
    await api.add(make("job_started", job="j", round=None, at=BEGAN), started())
    for number, has_failed in enumerate((True, True, False)):
        probes = (
            ProbeBeat(check="nic", every_s=10.0, policy="exclude", has_failed=has_failed),
            ProbeBeat(check="gpu", every_s=30.0, policy="observe"),
        )
        api.context.beats.hear(
            NodeBeat(
                job="j", node=f"n{number}", sequence=1, at=BEGAN, state="running",
                probes=probes, probe_cpu_ratio=number / 1000,
            )
        )  # fmt: skip
    found = await samples(api)
    assert found["everstep_job_probes_failed", "nic", "j", "exclude"] == 2
    assert found["everstep_job_probes_failed", "gpu", "j", "observe"] == 0
    assert found["everstep_job_probe_cpu_ratio", "j"] == 0.002


async def test_a_slow_rank_shows_until_it_is_cleared_or_its_round_is_over(api: Api) -> None:
    slow = make("straggler_found", job="j", round=1, rank=3, at=BEGAN)
    await api.add(
        make("job_started", job="j", round=None, at=BEGAN), started(),
        make("round_formed", job="j", round=1, at=BEGAN), slow,
    )  # fmt: skip
    assert (await samples(api))["everstep_job_stragglers", "j"] == 1
    await api.add(make("round_formed", job="j", round=2, at=BEGAN))
    assert (await samples(api))["everstep_job_stragglers", "j"] == 0


async def test_a_job_that_is_long_over_is_not_shown(api: Api) -> None:
    ended = make("job_ended", job="j", state="done", at=api.clock.wall() - timedelta(hours=2))
    await api.add(make("job_started", job="j", round=None, at=BEGAN), ended)
    assert not [key for key in await samples(api) if "j" in key]


async def test_no_metric_has_a_label_for_a_rank(api: Api) -> None:
    await api.add(make("job_started", job="j", round=None, at=BEGAN), *TRACE)
    shown = JobMetrics(api.database, api.context.goodput, api.context.beats, api.clock)
    await shown.refresh()
    labels = {name for family in shown.collect() for one in family.samples for name in one.labels}
    assert labels <= {
        "job", "name", "user", "version", "state", "window", "tier", "class", "cause",
    }  # fmt: skip


async def test_hostile_names_stay_one_sample(api: Api) -> None:
    """A name with line breaks and quotes makes no metric of its own (A13.4)."""
    hostile = 'x"} 1\neverstep_job_step{job="forged"} 99\n'
    spec = make("job_started").spec  # type: ignore[attr-defined]
    await api.add(make("job_started", job="j", at=BEGAN, user=hostile, spec=spec))
    assert ("everstep_job_step", "forged") not in await samples(api)
    assert ("everstep_job_info", "j", spec.name, hostile) in {
        key[:4] for key in await samples(api)
    } or pytest.fail("the name is not shown as it is")


async def test_what_cannot_be_reckoned_ends_no_loop_and_is_read_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job whose facts make no sense must not end the service of all others (A13.3)."""
    await api.add(make("job_started", job="j", at=BEGAN))
    shown = JobMetrics(api.database, api.context.goodput, api.context.beats, api.clock)
    reads: list[str] = []
    read = api.context.goodput.segments_of_many

    async def segments(
        jobs: Sequence[JobNews], now_s: float
    ) -> AsyncIterator[tuple[str, list[LedgerSegment]]]:
        reads.append(jobs[0].job)
        if len(reads) == 1:
            raise OverflowError("a time that no calendar has")
        async for found in read(jobs, now_s):
            yield found

    async def soon(_: float) -> None:
        """At once: each reading waits for the database."""

    monkeypatch.setattr(api.context.goodput, "segments_of_many", segments)
    monkeypatch.setattr(api.clock, "sleep", soon)
    loop = asyncio.create_task(
        shown.refresh_for_ever(is_mine=lambda: True, stands_by=lambda: False)
    )
    try:
        found = await until_async(
            lambda: [one for family in shown.collect() for one in family.samples], "metrics"
        )
    finally:
        loop.cancel()
        await asyncio.wait([loop])  # its connection must be back before the database is closed
    assert loop.cancelled()
    assert len(reads) > 1
    assert "j" in {one.labels["job"] for one in found}


async def test_the_last_values_stay_until_another_replica_shows_its_own(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them every alert would be resolved while the bus is away."""

    async def soon(_: float) -> None:
        await turns()

    monkeypatch.setattr(api.clock, "sleep", soon)
    await api.add(make("job_started", job="j", at=BEGAN))
    shown = JobMetrics(api.database, api.context.goodput, api.context.beats, api.clock)
    await shown.refresh()

    def shows() -> bool:
        return any(family.samples for family in shown.collect())

    assert shows()
    stands_by = False
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(
            shown.refresh_for_ever(is_mine=lambda: False, stands_by=lambda: stands_by)
        )
        await turns(10)
        assert shows()
        stands_by = True
        await until_async(shows, "the other one shows them", holds=not_)
        loop.cancel()
