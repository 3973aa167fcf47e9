"""REST answers: what each second of allocations was spent on."""

import itertools
from datetime import datetime, timedelta

import httpx2
import msgspec
import pytest

from everstep.messages import (
    CheckpointCommitted,
    CheckpointRestored,
    Fact,
    ProgressMade,
    RankRecovered,
    StragglerCleared,
)
from tests.integration.conftest import Api
from tests.integration.history.queries.sql_queries import counted
from tests.integration.history.test_rest_incidents import problem
from tests.integration.history.test_rest_lists import every_item, get
from tests.unit.history.facts import make
from tests.unit.history.goodput_trace import BEGAN, SECONDS, TRACE, at

DAY = {"since": BEGAN.isoformat(), "until": (BEGAN + timedelta(days=1)).isoformat()}


def second(number: float) -> str:
    return (BEGAN + timedelta(seconds=number)).isoformat()


async def test_a_job_shows_what_its_time_went_to(api: Api, reader: httpx2.AsyncClient) -> None:
    """A11.4."""
    await api.add(*TRACE)
    shown = await get(reader, "jobs/j/goodput")
    assert {name: lasted_s for name, lasted_s in shown["seconds"].items() if lasted_s} == SECONDS
    assert (shown["wall_s"], datetime.fromisoformat(shown["until"])) == (
        245,
        at(245, "job_ended").at,
    )
    assert shown["goodput_ratio"] == pytest.approx(SECONDS["productive"] / 245, abs=1e-6)
    window = await get(reader, "jobs/j/goodput", since=second(150), until=second(158))
    assert window["seconds"]["productive"] == 0
    assert (window["wall_s"], window["seconds"]["restore"]) == (8, 2)
    ahead = await get(reader, "jobs/j/goodput", until="9999-12-31T23:59:59Z")
    assert ahead["until"] < "9999", "time that has not passed is not measured"


async def test_what_is_added_later_counts(api: Api, reader: httpx2.AsyncClient) -> None:
    for fact in TRACE:
        await api.add(fact)
        await get(reader, "jobs/j/goodput") if fact is not TRACE[0] else None
    shown = await get(reader, "jobs/j/goodput")
    assert {name: lasted_s for name, lasted_s in shown["seconds"].items() if lasted_s} == SECONDS


async def test_the_timeline_has_every_part_in_order(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(*TRACE)
    parts = (await get(reader, "jobs/j/timeline"))["items"]
    assert parts[0]["since"].startswith("2026-11-25T08:00:00")
    assert all(one["until"] == after["since"] for one, after in itertools.pairwise(parts))
    assert {part["time_class"] for part in parts} == set(SECONDS) - {"straggler_tax"}
    assert max(part["tax_ratio"] for part in parts) > 0
    coarse = await get(reader, "jobs/j/timeline", most=10)
    assert coarse["is_coarse"]
    assert len(coarse["items"]) < len(parts)
    assert (coarse["items"][0]["since"], coarse["items"][-1]["until"]) == (
        parts[0]["since"], parts[-1]["until"],
    )  # fmt: skip


async def test_the_fleet_is_the_sum_of_its_jobs(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(
        *TRACE,
        make("job_started", job="k", at=BEGAN),
        make("allocation_started", job="k", allocation="k1", at=BEGAN),
        make("allocation_ended", job="k", allocation="k1", at=BEGAN + timedelta(seconds=100)),
    )
    fleet = await get(reader, "goodput", **DAY)
    assert (fleet["jobs"], fleet["wall_s"], fleet["is_cut"]) == (2, 345, False)
    assert fleet["seconds"]["productive"] == SECONDS["productive"]
    assert fleet["seconds"]["rendezvous"] == SECONDS["rendezvous"] + 100
    assert [one["job"] for one in fleet["worst"]] == ["k", "j"]
    before = {"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00Z"}
    empty = await get(reader, "goodput", **before)
    assert (empty["jobs"], empty["wall_s"], empty["goodput_ratio"]) == (0, 0, None)


@pytest.mark.parametrize("off_s", [300, -300])
async def test_clocks_of_nodes_that_are_minutes_off_change_no_order(
    api: Api, reader: httpx2.AsyncClient, off_s: int
) -> None:
    """Facts come in the order of the log, and time is neither lost nor counted twice (A11.3)."""
    of_nodes = ProgressMade | CheckpointCommitted | CheckpointRestored | RankRecovered
    skewed = [
        msgspec.structs.replace(fact, at=fact.at + timedelta(seconds=off_s))
        if isinstance(fact, of_nodes)
        else fact
        for fact in TRACE
    ]
    await api.add(*skewed)
    listed = [item["id"] for item in await every_item(reader, "facts", limit=4)]
    assert listed == [fact.id for fact in TRACE]
    assert [one["round"] for one in await every_item(reader, "jobs/j/rounds")] == [2, 1]
    shown = await get(reader, "jobs/j/goodput")
    assert shown["wall_s"] == sum(shown["seconds"].values()) == 245
    parts = (await get(reader, "jobs/j/timeline"))["items"]
    assert all(one["until"] == after["since"] for one, after in itertools.pairwise(parts))


def _life(job: str) -> list[Fact]:
    facts = [msgspec.structs.replace(fact, id=f"{job}-{fact.id}", job=job) for fact in TRACE]
    return [
        msgspec.structs.replace(fact, finding=f"{job}-{fact.finding}")
        if isinstance(fact, StragglerCleared)
        else fact
        for fact in facts
    ]


async def test_many_jobs_cost_few_queries_and_old_ones_none(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The first page of the dashboard asks for all jobs of a day (A11.6)."""
    names = [f"run-{number}" for number in range(40)]
    await api.add(*(fact for name in names for fact in _life(name)))
    with counted(api.database) as cold:
        first = await get(reader, "goodput", **DAY)
    with counted(api.database) as warm:
        again = await get(reader, "goodput", **DAY)
    assert first == again
    assert (first["jobs"], first["wall_s"]) == (40, 40 * 245)
    assert len(cold) < 8
    assert len([one for one in warm if "facts.body" in one]) == 0
    await api.add(make("rank_exited", job="run-3", at=BEGAN), *_life("run-40"))
    with counted(api.database) as news:
        more = await get(reader, "goodput", **DAY)
    assert (more["jobs"], more["wall_s"]) == (41, 41 * 245)
    assert len([one for one in news if "facts.body" in one]) == 1


async def test_what_is_read_together_is_what_is_read_alone(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """However far each job was read before."""
    lives = {name: _life(name) for name in ("a", "b", "c")}
    for cut in range(0, len(TRACE), 3):
        await api.add(*(fact for life in lives.values() for fact in life[cut : cut + 3]))
        if cut % 2:
            await get(reader, "goodput", **DAY)
        else:
            await reader.get("jobs/b/goodput")
    for worst in (await get(reader, "goodput", **DAY))["worst"]:
        assert {name: sum_s for name, sum_s in worst["seconds"].items() if sum_s} == SECONDS


async def test_bad_windows_and_unknown_jobs_are_refused(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(at(0, "job_started"), *TRACE)
    assert (await problem(reader, "jobs/nobody/goodput"))[0] == 404
    assert (await problem(reader, "jobs/nobody/timeline"))[0] == 404
    status, code, _ = await problem(reader, "goodput", since=second(5), until=second(5))
    assert (status, code) == (400, "bad_window")
    assert (await problem(reader, "jobs/j/goodput", since="yesterday"))[0] == 422
    for path in ("goodput", "jobs/j/goodput"):
        status, code, detail = await problem(reader, path, since="2999-01-01T00:00:00Z")
        assert (status, code) == (400, "bad_window"), path
        assert "2999-01-01T00:00:00Z" in detail
        assert "give a moment that has passed" in detail
    assert (await problem(reader, "jobs/j/timeline", most=3))[0] == 422
