"""The dashboard's files are read with its code: an upgrade below a running `up` changes them."""

from pathlib import Path
from typing import Any, NoReturn

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from everstep.clock import SystemClock
from everstep_services.history.dashboard.site import Dashboard


async def test_no_page_reads_a_file_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def absent(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        scope["state"]["token"] = type("Token", (), {"scope": "admin"})
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def refused(path: Path, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{path} is read after the upgrade")

    site = Dashboard(absent, SystemClock(), codes=None)  # type: ignore[arg-type]  # nobody logs in
    transport = httpx2.ASGITransport(app=site)
    for name in ("open", "read_text", "read_bytes", "iterdir", "is_dir"):
        monkeypatch.setattr(Path, name, refused)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://e", cookies={"everstep": "t"}
    ) as client:
        for path in ("/login", "/runbooks/cause-network"):
            answer = await client.get(path)
            assert answer.status_code == 200, path
        mark = await client.get("/favicon.ico", follow_redirects=True)
        assert mark.headers["Content-Type"] == "image/svg+xml"
