"""A language model explains finished verdicts: asked of a real server, and never believed."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.server.dev_server import DevServer
from everstep_services.attribution.explainer import Explainer
from everstep_services.attribution.settings import ExplainerSettings
from tests.integration.attribution.replicas import QUICK, Training, at_work, verdicts

KEY = "sk-0123456789abcdef"


class Endpoint:
    """An OpenAI-compatible server, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answer: bytes = b""
        self.status = 200
        self.headers: dict[str, str] = {}
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = (self.path, self.headers.get("Authorization", ""), body)
                endpoint.asked.append(asked)
                self.send_response(endpoint.status)
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(endpoint.answer)))
                self.end_headers()
                self.wfile.write(endpoint.answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def says(self, text: str) -> None:
        self.answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def settings(endpoint: Endpoint, key: Path | None = None) -> ExplainerSettings:
    return ExplainerSettings(url=endpoint.url, model="any", key_file=key, within_s=20.0)


async def test_it_explains_a_verdict_and_changes_nothing_of_it(
    shared_nats: DevServer, job: str, tmp_path: Path, endpoint: Endpoint
) -> None:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    endpoint.says(f"Node n1 is broken \x1b[2J, and my key is {KEY}.")
    explained = replace(QUICK, explainer=settings(endpoint, key))
    async with (
        connect(shared_nats.settings(SERVICE), "attribution", spool=tmp_path / "spool") as bus,
        at_work(bus, explained),
    ):
        training = Training(bus, job)
        await training.fail(text=f"{job} has no labels")
        first, second = await verdicts(bus, job, 2)
        assert (
            replace(second, id=first.id, at=first.at, revision=first.revision, explanation="")
            == first
        ), "whatever it says, nothing else of the verdict is another"
    assert (second.revision, first.explanation) == (1, "")
    assert "Node n1 is broken" in second.explanation
    assert KEY not in second.explanation
    assert "\x1b" not in second.explanation
    # the replica also judges what other tests left on this server
    ((path, authorization, body),) = [asked for asked in endpoint.asked if job in str(asked)]
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert body["model"] == "any"
    assert f"{job} has no labels" in body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [(500, b"oops"), (200, b"not json"), (200, b"{}"), (200, b"x" * 300_000), (302, b"")],
)
async def test_an_endpoint_that_fails_costs_the_explanation_and_nothing_else(
    shared_nats: DevServer, job: str, tmp_path: Path, endpoint: Endpoint, status: int, answer: bytes
) -> None:
    endpoint.status, endpoint.answer = status, answer
    endpoint.headers = {"Location": endpoint.url + "/elsewhere"} if status == 302 else {}
    async with (
        connect(shared_nats.settings(SERVICE), "attribution", spool=tmp_path / "spool") as bus,
        at_work(bus),
    ):
        training = Training(bus, job)
        await training.fail()
        (verdict,) = await verdicts(bus, job)
        explainer = Explainer(settings(endpoint))
        text, failure = await explainer.explain(verdict)
    assert (text, bool(failure), "\n" in failure) == ("", True, False)
    assert (explainer.failures, len(endpoint.asked)) == (1, 1)


async def test_the_verdict_tells_that_its_explanation_failed(
    shared_nats: DevServer, job: str, tmp_path: Path, endpoint: Endpoint
) -> None:
    """Whoever set a model learns in one line why its words are not there."""
    endpoint.status = 500
    async with (
        connect(shared_nats.settings(SERVICE), "attribution", spool=tmp_path / "spool") as bus,
        at_work(bus, replace(QUICK, explainer=settings(endpoint))),
    ):
        training = Training(bus, job)
        await training.fail()
        first, second = await verdicts(bus, job, 2)
    assert second.missing[0].startswith(
        "the explanation by a language model failed: HTTP Error 500"
    )
    assert (second.missing[1:], second.explanation) == (first.missing, "")
    assert second.reason == first.reason


def test_nobody_is_asked_by_default() -> None:
    assert not Explainer(ExplainerSettings()).is_on


@pytest.mark.parametrize(
    "bad", [{"url": "file:///etc/passwd", "model": "x"}, {"url": "http://a/v1"}, {"within_s": 0.0}]
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        ExplainerSettings(**bad)
