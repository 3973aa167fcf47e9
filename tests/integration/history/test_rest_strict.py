"""What only looks like a value is not taken for it, and what is not possible says what is."""

from typing import Any

import httpx2
import pytest

from tests.integration.conftest import Api
from tests.unit.history.facts import make


@pytest.fixture
async def operator(api: Api) -> httpx2.AsyncClient:
    await api.open()
    return api.client(await api.token("operate"))


QUERIES = [
    *("facts?until=0.5", "facts?since=0", "facts?since=1e9", "facts?until=2026-01-31"),
    *("facts?limit=1.0", "facts?limit=%2B5", "facts?limit=1_0", "facts?round=%205"),
    *("facts?after=1e3", "nodes?healthy=yes", "nodes?suspect=1", "nodes?excluded=T"),
    *("jobs/j/stragglers?rank=1.0", "jobs/j/stragglers/now?most=0", "jobs/j/timings?first=1"),
    *("incidents?open=on", "jobs/j/rounds/1.0", "jobs/j/rounds/%2B1", "facts?limit=%D9%A1"),
]


async def test_a_query_is_taken_literally(reader: httpx2.AsyncClient) -> None:
    for query in QUERIES:
        answer = await reader.get(query)
        assert answer.status_code == 422, (query, answer.text)
        assert answer.json()["errors"][0]["problem"]


async def test_what_is_written_plainly_is_taken(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(make("round_formed", job="j", round=1))
    for query in (
        "facts?since=2026-01-31T12:00:00Z&until=2026-01-31T14:00:00.5%2B01:00&limit=5&after=0",
        "nodes?healthy=true&suspect=false",
        "jobs/j/rounds/1",
    ):
        assert (await reader.get(query)).status_code == 200, query


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("nodes/n:exclude", {"ttl_s": False}),
    ("nodes/n:exclude", {"ttl_s": "60"}),
    ("nodes/n:drain", {"job": "j", "within_s": True}),
    ("jobs/j:stop", {"save_first": "yes"}),
    ("jobs/j:stop", {"save_first": 1}),
    ("jobs/j:restart", {"round": 1.0}),
    ("jobs/j:restart", {"round": "1"}),
    ("jobs/j:restart", {"without_nodes": [1]}),
    ("jobs/j:measure", {"partners": True}),
    ("brake", {"is_on": "on"}),
    ("jobs/j/checkpoints:collect", {"keep_last": "3"}),
]


async def test_a_body_is_taken_literally(operator: httpx2.AsyncClient) -> None:
    for path, body in BODIES:
        answer = await operator.post(path, json=body)
        assert answer.status_code == 422, (path, body, answer.text)


METHODS = [
    ("GET", "jobs/j:stop", "POST"),
    ("GET", "nodes/n:exclude", "POST"),
    ("PUT", "jobs/j", "GET, HEAD"),
    ("DELETE", "jobs/j:save", "POST"),
    ("GET", "jobs/j/limits/data", "DELETE, PUT"),
    ("POST", "jobs/j/limits/a/b", "DELETE, PUT"),
    ("PATCH", "tokens", "GET, HEAD, POST"),
    ("GET", "tokens/0123456789ab", "DELETE"),
    ("PATCH", "control", "GET, HEAD, POST"),
    ("GET", "jobs/j/checkpoints/5:pin", "POST"),
    ("POST", "jobs/j/checkpoints/5", "GET, HEAD"),
    ("OPTIONS", "jobs", "GET, HEAD"),
]


async def test_a_method_that_is_not_possible_names_those_that_are(
    operator: httpx2.AsyncClient,
) -> None:
    for method, path, allowed in METHODS:
        answer = await operator.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (path, answer.text)
        assert answer.json()["detail"] == f"{method} is not possible here: use {allowed}"


async def test_a_name_that_people_only_asked_about_is_no_job(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    for kind in ("operator_acted", "limits_learned", "control_changed", "checkpoint_deleted"):
        await api.add(make(kind, job="typo", round=None))
    assert (await reader.get("jobs")).json()["items"] == []
    for path in ("", "/rounds", "/limits", "/ranks", "/incidents", "/checkpoints"):
        assert (await reader.get(f"jobs/typo{path}")).status_code == 404, path
    assert len((await reader.get("facts?job=typo")).json()["items"]) == 4, "they stay on record"
    await api.add(make("round_formed", job="typo", round=1))  # late, and it was a job after all
    assert [one["job"] for one in (await reader.get("jobs")).json()["items"]] == ["typo"]
    assert (await reader.get("jobs/typo")).json()["facts"] == 5
