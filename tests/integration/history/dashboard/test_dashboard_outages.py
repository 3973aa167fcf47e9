"""Pages while the bus or the database is away: what they knew, with its age."""

import asyncio
from pathlib import Path

import pytest

from everstep_services.history.dashboard import rest
from tests.integration.history.dashboard.fleet_facts import JOB
from tests.integration.history.dashboard.visitors import fleet


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
