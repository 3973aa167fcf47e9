"""The pages and REST of a bundle: a calm line says what it is, and nothing can be done there."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest

from everstep.clock import SystemClock
from everstep.messages import BlobRef
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.times import to_us
from everstep.store.tokens import Scope
from everstep_services.cli.api.record import AbsentBus
from everstep_services.history.api.app import PARTS, create_app, make_context
from everstep_services.history.bundle import BundleError, read_origin, unpack, write_bundle
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import opened
from tests.integration.history.dashboard.fleet_facts import JOB, KILLED, STALLED, node
from tests.integration.history.test_rest_live import listening

BASE = "http://everstep.test"
OURS = {"Origin": BASE, "Content-Type": "application/x-www-form-urlencoded"}
PAGES = (
    "/jobs", f"/jobs/{JOB}", f"/jobs/{JOB}/ranks?rank=93", f"/jobs/{JOB}/stragglers",
    f"/jobs/{JOB}/checkpoints", "/incidents", f"/incidents/{KILLED}", f"/incidents/{STALLED}",
    "/nodes", f"/nodes/{node(2)}", "/facts",
)  # fmt: skip
_EXPORTED = datetime.now(UTC) - timedelta(days=3)


@asynccontextmanager
async def bundle(folder: Path) -> AsyncIterator[Api]:
    """A bundle of the fleet's main job, served in this process."""
    async with opened(folder) as source:

        async def fetch(ref: BlobRef) -> bytes:
            return await source.bus.blobs.get(ref)

        file, now_us = folder / "job.everstep", to_us(_EXPORTED)
        await write_bundle(source.database, JOB, file, fetch=fetch, now_us=now_us)
    await asyncio.to_thread(unpack, file, folder / "bundle.db")
    async with open_database(f"sqlite:///{folder / 'bundle.db'}") as database:
        served = Api(database, FactLog(database, fold), SystemClock())
        await served.open()
        absent: Any = AbsentBus()
        served.is_bus_connected = served.is_projecting = False
        served.context = await make_context(
            served.context.settings, database, served.notifier, served.context.connectedness,
            clock=served.clock, bus=absent, bundle=await read_origin(database),
        )  # fmt: skip
        served.app = create_app(served.context)
        yield served


async def visitor(served: Api, scope: Scope) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=served.app, client=("10.0.0.1", 1234))
    client = httpx2.AsyncClient(transport=transport, base_url=BASE)
    token = await served.token(scope)
    await client.post("/login", content=urlencode({"token": token}), headers=OURS)
    return client


async def test_pages_of_a_bundle_say_what_it_is_and_offer_no_action(tmp_path: Path) -> None:
    """A11.2: history survives the loss of everything else."""
    async with bundle(tmp_path) as served:
        client = await visitor(served, "admin")
        start = await client.get("/")
        assert start.headers["location"] == f"/jobs/{JOB}"
        for path in PAGES:
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            note = re.search(r'<p class="bundle".*?</p>', answer.text)
            assert note is not None, path
            assert JOB in note[0]
            assert f"exported {_EXPORTED:%Y-%m-%d %H:%M} UTC" in note[0]
            assert f'data-now="{_EXPORTED:%Y-%m-%dT%H:%M}' in answer.text, path
            assert "3 d ago" not in answer.text, "ages count to the export"
            assert "read-only" in note[0]
            forms = re.findall(r'<form[^>]* action="([^"]*)"', answer.text)
            assert set(forms) <= {"/logout", "/jobs", "/incidents", "/nodes", "/facts"}, path
            for word in ("/do/", 'class="banner', "data-live", "cannot be asked", "is away"):
                assert word not in answer.text, (path, word)


async def test_what_only_a_cluster_has_is_a_page_of_its_own(tmp_path: Path) -> None:
    async with bundle(tmp_path) as served:
        client = await visitor(served, "admin")
        for path in ("/control", f"/do/stop?job={JOB}", f"/jobs/{JOB}/checkpoints/holders?step=1"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert "Not in a bundle" in answer.text
        refused = await client.post("/do/stop", content=urlencode({"job": JOB}), headers=OURS)
        assert refused.status_code == 405


async def test_a_bundle_says_that_it_has_no_log_store(tmp_path: Path) -> None:
    async with bundle(tmp_path) as served, served.client(await served.token()) as reader:
        for path in ("logs", "logs?round=1&rank=21", "logs/stream", "logs/rounds"):
            answer = await reader.get(f"jobs/{JOB}/{path}")
            assert (answer.status_code, answer.json()["code"]) == (404, "logs_not_stored"), path
            assert "with the incidents" in answer.json()["detail"]


async def test_wrong_values_in_a_bundle_are_its_own_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bundle is a file from elsewhere: no traceback, and no talk of an error of Everstep."""
    async with bundle(tmp_path) as served:
        client = await visitor(served, "admin")
        async with served.database.write() as connection:
            query = "SELECT id FROM facts ORDER BY n LIMIT 1"
            fact = (await connection.exec_driver_sql(query)).scalar_one()
            await connection.exec_driver_sql("UPDATE jobs SET labels = '{bad'")
            await connection.exec_driver_sql("UPDATE facts SET body = 'nojson'")
        caplog.clear()
        async with served.client(await served.token()) as reader:
            for path in (f"jobs/{JOB}", "facts", f"facts/{fact}"):
                answer = await reader.get(path)
                assert (answer.status_code, answer.json()["code"]) == (500, "bundle_damaged"), path
                assert answer.json()["detail"].startswith("the bundle is damaged: ")
        for path in (f"/jobs/{JOB}", "/facts"):
            page = await client.get(path)
            assert page.status_code == 500, path
            assert "This part of the bundle cannot be read" in page.text, path
            assert "bundle is damaged" in page.text, path
        assert [record for record in caplog.records if record.exc_info] == []


async def test_a_stream_ends_at_a_damaged_fact_with_the_words_of_the_list(tmp_path: Path) -> None:
    async with bundle(tmp_path) as served:
        async with served.database.write() as connection:
            query = "SELECT id, n FROM facts ORDER BY n LIMIT 3"
            rows = (await connection.exec_driver_sql(query)).all()
            (first, second, _), n = [row.id for row in rows], rows[2].n
            await connection.exec_driver_sql(f"UPDATE facts SET body = 'nojson' WHERE n = {n}")
        token = await served.token()
        async with served.client(token) as reader:
            said = (await reader.get("facts")).json()
        async with listening(served, token, "after=0") as stream:
            assert await stream.facts(2) == [first, second]
            event = await stream.block()
            await stream.is_over.wait()
        assert event["event"] == "problem"
        assert json.loads(event["data"]) == {"detail": said["detail"], "code": "bundle_damaged"}
        async with listening(served, token, f"after={n}") as stream:
            assert len(await stream.facts(2)) == 2, "what comes after the damage can be read"


@pytest.mark.parametrize("change", ["job = '<script>'", "job = x'00ff'", "exported_us = 'soon'"])
async def test_a_bundle_of_no_possible_job_is_refused(tmp_path: Path, change: str) -> None:
    async with bundle(tmp_path) as served:
        async with served.database.write() as connection:
            await connection.exec_driver_sql(f"UPDATE bundle_origin SET {change}")
        with pytest.raises(BundleError, match="the bundle is damaged: "):
            await read_origin(served.database)


async def test_no_token_can_change_a_bundle_by_rest(tmp_path: Path) -> None:
    """A13.1: also a token of an administrator, made in the unpacked database."""
    async with bundle(tmp_path) as served:
        async with served.client(await served.token("admin")) as client:
            refused = 0
            for route in (route for part in PARTS for route in part.router.routes):
                for method in sorted(getattr(route, "methods", set()) - {"GET", "HEAD"}):
                    path = getattr(route, "path", "")
                    url = re.sub(r"\{[^}]*\}", "x", path)
                    if path == "/login-codes":
                        continue
                    answer = await client.request(method, url, json={"reason": "x"})
                    assert answer.status_code == 403, (method, path, answer.text)
                    assert answer.json()["code"] == "read_only"
                    assert "cluster" in answer.json()["detail"]
                    refused += 1
            assert refused >= 20
            status = (await client.get("/status")).json()
        assert status["bundle"]["job"] == JOB
        assert status["bundle"]["exported_at"] is not None


async def test_time_stands_still_in_a_bundle(tmp_path: Path) -> None:
    """A job that ran at the export has no hours of idle time since."""
    async with bundle(tmp_path) as served:
        until = served.context.clock.wall()
        assert abs((until - _EXPORTED).total_seconds()) < 1


async def test_a_bundle_of_an_older_release_shows_its_newest_fact(tmp_path: Path) -> None:
    async with bundle(tmp_path) as served:
        async with served.database.write() as connection:
            await connection.exec_driver_sql("DROP TABLE bundle_origin")
        origin = await read_origin(served.database)
    assert origin is not None
    assert (origin.job, origin.exported_at) == (JOB, None)
    assert origin.until > _EXPORTED
