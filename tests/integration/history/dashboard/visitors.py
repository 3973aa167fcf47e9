"""People at the dashboard: browsers that are logged in, and the forms that they send."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2

from everstep.store.tokens import Scope
from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import opened

BASE = "http://everstep.test"
OURS = {"Origin": BASE, "Content-Type": "application/x-www-form-urlencoded"}


@asynccontextmanager
async def fleet(folder: Path, scope: Scope = "read") -> AsyncIterator[tuple[Api, Any]]:
    """A fleet, and a client that is logged in."""
    async with opened(folder) as api:
        client = browser(api)
        await log_in(client, await api.token(scope))
        yield api, client


def browser(api: Api) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=api.app, client=("10.0.0.1", 1234))
    return httpx2.AsyncClient(transport=transport, base_url=BASE)


async def log_in(client: httpx2.AsyncClient, token: str) -> httpx2.Response:
    return await client.post("/login", content=urlencode({"token": token}), headers=OURS)


def key_of(page: str) -> str:
    found = re.search(r'name="key" value="([0-9a-f]{32})"', page)
    assert found is not None
    return found[1]


class FormFields(HTMLParser):
    """What a browser would send of the form of an action, if a person changed nothing."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._is_inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "form":
            self._is_inside = (given.get("action") or "").startswith("/do/")
        if not self._is_inside or tag != "input":
            return
        if given.get("type") == "checkbox" and "checked" not in given:
            return
        is_box = given.get("type") == "checkbox"
        self.values[given["name"] or ""] = given.get("value", "on" if is_box else "") or ""
