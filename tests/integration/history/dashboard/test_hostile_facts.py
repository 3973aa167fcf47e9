"""Facts with every value that a job may send: each page and each REST endpoint answers."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.ids import new_id
from everstep.messages import FACTS, BadMessageError, Fact, decode, encode
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.api.app import BASE, PARTS
from everstep_services.history.projections.fold import fold
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.integration.history.dashboard.visitors import browser, log_in
from tests.unit.history.story import INCIDENT, JOB, whole
from tests.unit.messages.test_bounds import HOSTILE, replaced
from tests.unit.messages.write_golden import example

FEW = ("text", "year 1", "1e308")
ACCEPTED = ("2999-12-31T23:59:59Z", "1970-01-01T00:00:00Z", 1e10, 2**53 - 1)


def hostile_facts() -> Iterator[Fact]:
    """Of each kind, with each field hostile in turn; only those that are decoded."""
    values = (*(HOSTILE[name] for name in FEW), *ACCEPTED)
    for kind in FACTS:
        whole_fact = json.loads(encode(example(kind)))
        known = {"job": JOB, "incident": INCIDENT, "round": 1}
        about = {name: value for name, value in known.items() if name in whole_fact}
        for value in values:
            damaged: Any
            for damaged in replaced({**whole_fact, **about}, value):
                own = {"id": new_id(), "job": JOB}
                try:
                    fact = decode(json.dumps({**damaged, **own}).encode())
                except BadMessageError:
                    continue
                assert isinstance(fact, Fact)
                yield fact


def paths(api: Api) -> set[str]:
    """Every address to read, about the job and the incident."""
    asked = {"job": JOB, "incident": INCIDENT, "node": "n1"}
    found: set[str] = set()
    site: Any = api.app
    for prefix, routes in (
        ("", site._router.routes),
        (BASE, [route for part in PARTS for route in part.router.routes]),
    ):
        for route in routes:
            if "GET" in (route.methods or {"GET"}) and not re.search(r"stream|live", route.path):
                filled = re.sub(r"{(\w+)[^}]*}", lambda name: asked.get(name[1], "1"), route.path)
                found.add(f"{prefix}{filled}")
    return found


@pytest.mark.variant
async def test_no_value_that_a_job_may_send_breaks_an_answer(tmp_path: Path) -> None:
    facts = await asyncio.to_thread(lambda: list(hostile_facts()))
    async with open_database(f"sqlite:///{tmp_path / 'h.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), FakeClock())
        await api.open()
        await api.add(*whole())
        await api.add(*facts)
        token = await api.token("read")
        everywhere = paths(api)
        assert {f"/jobs/{JOB}", f"/api/v1/incidents/{INCIDENT}", "/facts"} <= everywhere
        broken: dict[str, int] = {}
        async with browser(api) as client:
            await log_in(client, token)
            for path in sorted(everywhere):
                answer = await client.get(path, headers={"Authorization": f"Bearer {token}"})
                if answer.status_code >= 500 and answer.status_code != 503:
                    broken[path] = answer.status_code
    assert broken == {}
