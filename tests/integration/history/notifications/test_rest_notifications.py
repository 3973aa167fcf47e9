"""The test of notifications by REST: who may ask for it, and what it answers."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep_services.history.api.app import create_app
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import NotifySettings, WebhookSettings
from everstep_services.history.notifications.targets import signed_headers
from tests.integration.conftest import Api
from tests.integration.history.notifications.targets import TargetServer


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: how a database answers makes no difference here."""
    return sqlite_url


@pytest.fixture
async def server() -> AsyncIterator[TargetServer]:
    made = TargetServer()
    async with made.up():
        yield made


async def test_what_the_targets_answer(api: Api, server: TargetServer) -> None:
    settings = NotifySettings(webhook=WebhookSettings(url=f"{server.url}/hook"))
    notifications = Notifications(settings, api.bus, SystemClock())
    api.app = create_app(replace(api.context, notifications=notifications))
    server.plan = [(410, {})]
    async with api.client(await api.token("operate")) as client:
        refused = (await client.post("/notifications/test", json={})).json()
        taken = (await client.post("/notifications/test", json={"target": "webhook"})).json()
        unset = await client.post("/notifications/test", json={"target": "slack"})
        unknown = await client.post("/notifications/test", json={"target": "teams"})
    assert refused["targets"][0]["is_taken"] is False
    assert refused["targets"][0]["text"].startswith("status 410")
    assert taken["targets"][0]["is_taken"] is True
    assert (unset.status_code, unset.json()["code"]) == (409, "not_set")
    assert unknown.status_code == 422
    assert [one.json["event"] for one in server.heard] == ["test", "test"]


async def test_health_events_are_signed_as_notices_are(
    api: Api, server: TargetServer, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    webhook = WebhookSettings(url=f"{server.url}/hook", secret_file=key, format="health_events")
    notifications = Notifications(NotifySettings(webhook=webhook), api.bus, SystemClock())
    api.app = create_app(replace(api.context, notifications=notifications))
    async with api.client(await api.token("operate")) as client:
        taken = (await client.post("/notifications/test", json={})).json()
    assert taken["targets"][0]["is_taken"] is True
    (request,) = server.heard
    headers = {name.lower(): value for name, value in request.headers.items()}
    expected = signed_headers("0123456789abcdef", request.body, int(headers["everstep-timestamp"]))
    assert headers["everstep-signature"] == expected["Everstep-Signature"]
    assert request.json["events"][0]["agent"] == "everstep"


async def test_a_reader_may_not_send(api: Api) -> None:
    async with api.client(await api.token("read")) as client:
        assert (await client.post("/notifications/test", json={})).status_code == 403
