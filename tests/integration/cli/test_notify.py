"""`everstep notify test`: what it prints, and how it exits."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from everstep_services.cli.errors import Exit
from everstep_services.history.notifications.settings import (
    AlertmanagerSettings,
    NotifySettings,
    WebhookSettings,
)
from tests.integration.history.served_story import Run, ServedStory


class Target(BaseHTTPRequestHandler):
    """Takes what comes to `/good`, and nothing else."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path == "/good" else 404)
        self.end_headers()
        self.wfile.write(b"no_team" if self.path != "/good" else b"ok")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def target() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Target) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def run(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    settings = NotifySettings(
        webhook=WebhookSettings(url=f"{target}/good"), alertmanager=AlertmanagerSettings(url=target)
    )
    folder = tmp_path / "served"
    folder.mkdir()
    with ServedStory(folder, scope="operate", notify=settings) as story:
        yield story.command(capsys)


def test_each_target_has_a_line_and_one_that_fails_is_an_exit_code(run: Run) -> None:
    code, out, _ = run("notify", "test")
    assert code == Exit.ERROR
    assert out.splitlines() == [
        'webhook: ok, status 200: "ok"',
        'alertmanager: failed, status 404: "no_team"',
    ]
    code, out, _ = run("notify", "test", "--target", "webhook", "-o", "json")
    assert code == Exit.OK
    assert json.loads(out)["items"] == [
        {"target": "webhook", "is_taken": True, "text": 'status 200: "ok"'}
    ]


def test_a_target_that_is_not_set_is_named(run: Run) -> None:
    code, _, err = run("notify", "test", "--target", "slack")
    assert code != Exit.OK
    assert "slack is not set in [notify]" in err
