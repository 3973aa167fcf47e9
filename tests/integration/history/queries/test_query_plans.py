"""What a page costs does not grow with the log: SQLite's own plans say which rows are read."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import event

from everstep.clock import SystemClock
from everstep.store.database import Database, open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.queries.sql_queries import counted
from tests.unit.history.facts import make
from tests.unit.history.story import INCIDENT, JOB, whole

PATHS = [
    "facts?order=desc",
    "facts?kind=rank_exited&order=desc",
    f"facts?job={JOB}&order=desc",
    f"facts?job={JOB}&kind=progress_made&order=desc",
    f"facts?job={JOB}&kind=progress_made&kind=round_ended",
    "facts?node=node-1&order=desc",
    "facts?since=2026-11-21T07:00:00Z",
    "facts?received_since=2026-11-21T07:00:00Z&received_until=2026-11-22T07:00:00Z",
    f"jobs/{JOB}/goodput",
    "goodput?since=2026-11-21T00:00:00Z&until=2026-11-22T00:00:00Z",
    f"incidents/{INCIDENT}",
    f"jobs/{JOB}/rounds",
    f"jobs/{JOB}/incidents",
    f"jobs/{JOB}/numerics",
    f"jobs/{JOB}/numerics/determinism",
    "incidents",
    "jobs",
    "nodes",
    "nodes?attention=true",
    "saves?failing=true&state=running",
    "save-delays?waiting=true",
]


@pytest.fixture
async def database(tmp_path: Any) -> AsyncIterator[Database]:
    async with open_database(f"sqlite:///{tmp_path / 'plans.db'}") as opened:
        await upgrade(opened)
        yield opened


@pytest.fixture
async def told(database: Database) -> Api:
    made = Api(database, FactLog(database, fold), SystemClock())
    await made.open(token_cache_s=86_400)  # a slow machine must not look it up again
    await made.add(*whole())
    return made


async def plans(api: Api, path: str) -> list[str]:
    """How the database reads what a request asks for."""
    found: list[str] = []

    def explain(_connection: Any, cursor: Any, statement: str, values: Any, *_: object) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            cursor.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            found.extend(row[3] for row in cursor.fetchall())

    engine = api.database._reader.sync_engine
    event.listen(engine, "before_cursor_execute", explain)
    try:
        async with api.client(await api.token()) as client:
            answer = await client.get(path)
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    assert answer.status_code == 200, answer.text
    assert found
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_no_request_reads_the_whole_log(told: Api, path: str) -> None:
    """Facts are found by an index, in its order (A11.6)."""
    steps = await plans(told, path)
    whole_log = [
        step for step in steps if re.match(r"SCAN facts(?! USING (COVERING )?INDEX)", step)
    ]
    # The newest facts of all are read along the primary key, as many as the page has.
    assert path == "facts?order=desc" or whole_log == [], steps
    if path.startswith("facts") and path.count("kind=") < 2:
        assert not [step for step in steps if "TEMP B-TREE" in step], steps


async def test_the_goodput_of_a_day_reads_only_the_allocations_of_that_day(told: Api) -> None:
    """The jobs of a day are found among those of years (A11.6)."""
    window = "since=2026-11-21T00:00:00Z&until=2026-11-22T00:00:00Z"
    steps = await plans(told, f"goodput?{window}")
    found = [step for step in steps if "allocations" in step]
    assert found, steps
    assert all("USING INDEX ix_allocations_ended_us" in step for step in found), steps
    assert not [step for step in steps if step.startswith("SCAN jobs")], steps


async def test_facts_of_a_kind_of_one_job_have_an_index(told: Api) -> None:
    """Of a job with a hundred thousand facts, only those of the kind are read (A11.6)."""
    steps = await plans(told, f"facts?job={JOB}&kind=round_ended&order=desc")
    assert any("ix_facts_job_kind_n" in step for step in steps), steps


@pytest.mark.parametrize(
    ("path", "most"),
    [("jobs", 2), ("incidents", 2), ("facts", 3), ("nodes", 2), (f"jobs/{JOB}", 6)],
)
async def test_a_list_costs_the_same_queries_however_long_it_is(
    told: Api, path: str, most: int
) -> None:
    """A11.6."""
    async with told.client(await told.token()) as client:
        await client.get(path)  # the token was looked up
        counts = []
        for number in range(2):
            with counted(told.database) as statements:
                assert (await client.get(path)).status_code == 200
            counts.append(len(statements))
            await told.add(
                *(make("job_started", job=f"more-{number}-{i}") for i in range(50)),
                *(make("incident_opened", job="j", incident=f"i{number}-{i}") for i in range(50)),
                *(make("node_joined", job="j", node=f"n{number}-{i}") for i in range(50)),
            )
    assert counts[0] == counts[1] <= most


async def test_the_story_of_an_incident_costs_the_same_queries_however_many_are_like_it(
    told: Api,
) -> None:
    """A11.6."""
    async with told.client(await told.token()) as client:
        await client.get(f"incidents/{INCIDENT}")
        with counted(told.database) as alone:
            await client.get(f"incidents/{INCIDENT}")
        await told.add(
            *(
                make("incident_opened", job=f"j{i}", incident=f"like-{i}", node="node-2")
                for i in range(100)
            )
        )
        with counted(told.database) as among:
            shown = (await client.get(f"incidents/{INCIDENT}")).json()
    assert len(shown["similar"]) == 20
    assert len(among) == len(alone)
