"""Values at the ends of what a parameter takes, at every endpoint of REST that takes one."""

from typing import Any

import httpx2
import pytest

from tests.integration.conftest import Api
from tests.unit.history.facts import make

MOMENTS = [
    f"{date}T{time}{offset}"
    for date in ("0001-01-01", "0002-01-01", "9998-12-31", "9999-12-31")
    for time in ("00:00:00", "23:59:59.999999")
    for offset in ("Z", "+14:00", "-12:00", "+23:59", "-23:59")
]


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: parameters are checked before any database is asked."""
    return sqlite_url


async def _parameters(api: Api, reader: httpx2.AsyncClient) -> list[tuple[str, str, Any]]:
    await api.add(make("job_started", job="j"))
    pages = (await reader.get("openapi.json")).json()["paths"]
    return [
        (path.removeprefix("/api/v1/").replace("{job}", "j"), parameter["name"], form)
        for path, methods in pages.items()
        for parameter in methods.get("get", {}).get("parameters", ())
        if parameter["in"] == "query" and "stream" not in path
        for form in parameter["schema"].get("anyOf", [parameter["schema"]])
        if "{" not in path.replace("{job}", "")
    ]


async def test_no_moment_of_the_calendar_is_a_bug(api: Api, reader: httpx2.AsyncClient) -> None:
    asked = [a for a in await _parameters(api, reader) if a[2].get("format") == "date-time"]
    assert asked
    for path, name, _ in asked:
        for moment in MOMENTS:
            answer = await reader.get(path, params={name: moment})
            assert answer.status_code < 500 or answer.status_code == 503, (path, name, moment)


async def test_whole_numbers_are_taken_within_the_described_bounds(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    asked = [a for a in await _parameters(api, reader) if a[2].get("type") == "integer"]
    assert asked
    for path, name, form in asked:
        assert not form.keys() & {"ge", "le"}, (path, name)
        if (await reader.get(path)).status_code == 403:
            continue  # a reader may not ask this, whatever the parameters
        for bound, step in (("minimum", -1), ("maximum", 1)):
            inside = await reader.get(path, params={name: form[bound]})
            outside = await reader.get(path, params={name: form[bound] + step})
            assert (inside.status_code != 422, outside.status_code) == (True, 422), (path, name)
