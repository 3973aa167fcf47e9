"""Commands that get something done: what they ask for, of whom, and what they say to it."""

import json
import os
import pwd
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit

ME = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
TEXT = "round 4 ends; another one follows"


class Api:
    """An API that says yes to everything, until the test forbids it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = 202
        self.problem = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {})

            def do_POST(self) -> None:
                self._take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            do_PUT = do_POST  # noqa: N815  the name that http.server looks for

            def do_DELETE(self) -> None:
                self._take({})

            def _take(self, body: dict[str, Any]) -> None:
                outer.asked.append((self.path.removeprefix("/api/v1/"), body))
                if outer.status >= 400:
                    self._answer(outer.status, {"detail": outer.problem})
                    return
                done = {"job": "llama", "action": "x", "node": None, "by": ME, "text": TEXT}
                self._answer(outer.status, done)

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    made = Api()
    thread = Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.mark.parametrize(
    ("arguments", "path", "details"),
    [
        (["stop", "llama"], "jobs/llama:stop", {"save_first": True}),
        (["stop", "llama", "--no-save"], "jobs/llama:stop", {"save_first": False}),
        (["restart", "llama"], "jobs/llama:restart",
         {"round": None, "without_nodes": [], "save_first": False}),
        (["restart", "llama", "--round", "4", "--without", "n1", "--without", "n2", "--save"],
         "jobs/llama:restart",
         {"round": 4, "without_nodes": ["n1", "n2"], "save_first": True}),
        (["save", "llama"], "jobs/llama:save", {}),
        (["drain", "n1"], "nodes/n1:drain", {"job": None, "within_s": None}),
        (["drain", "n1", "--job", "llama", "--save-within", "30"], "nodes/n1:drain",
         {"job": "llama", "within_s": 30.0}),
        (["stop", "a/../b"], "jobs/a%2F..%2Fb:stop", {"save_first": True}),
        (["node", "exclude", "n1"], "nodes/n1:exclude", {"ttl_s": None}),
        (["node", "exclude", "n1", "--for", "2h"], "nodes/n1:exclude", {"ttl_s": 7200}),
        (["node", "exclude", "n1", "--for-good"], "nodes/n1:exclude", {"ttl_s": 0.0}),
        (["node", "exclude", "n1", "--force"], "nodes/n1:exclude", {"ttl_s": None, "force": True}),
        (["node", "include", "n1"], "nodes/n1:include", {}),
        (["limits", "llama", "--set", "data/load=1.5m"], "jobs/llama/limits/data%2Fload",
         {"limit_s": 90.0}),
        (["limits", "llama", "--set", "outside=30s"], "jobs/llama/limits/outside",
         {"limit_s": 30.0}),
        (["limits", "set", "data=90s", "--job", "llama"], "jobs/llama/limits/data",
         {"limit_s": 90.0}),
        (["brake", "set", "off"], "control", {"changes": {"brake": "off"}, "job": None}),
        (["brake", "on"], "control", {"changes": {"brake": "on"}, "job": None}),
        (["brake", "off", "--job", "llama"], "control",
         {"changes": {"brake": "off"}, "job": "llama"}),
        (["control", "set", "modes.exclude=enforce", "breaker=closed"], "control",
         {"changes": {"modes.exclude": "enforce", "breaker": "closed"}, "job": None}),
    ],
)  # fmt: skip
def test_a_command_asks_the_api_and_says_who_asks(
    api: Api,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    path: str,
    details: dict[str, Any],
) -> None:
    assert main([*arguments, "--reason", "too slow", "--api", api.url]) == 0
    assert api.asked == [(path, {"reason": "too slow", "user": ME, **details})]
    assert capsys.readouterr() == (f"llama: {TEXT}\n", "")


def test_a_limit_is_given_back_by_deleting_it(api: Api) -> None:
    arguments = ["limits", "llama", "--set", "data=auto", "--set", "eval=2h"]
    assert main([*arguments, "--reason", "fast", "--api", api.url]) == 0
    assert [path for path, _ in api.asked] == [
        f"jobs/llama/limits/data?reason=fast&user={ME.replace('@', '%40')}",
        "jobs/llama/limits/eval",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["limits", "llama", "--set", "data"], "'data' is not a limit: write SECTION=30s"),
        (["limits", "llama", "--set", "data=soon"], "'data=soon' is not a limit"),
        (["limits", "llama", "--set", "data=0s"], "'data=0s' is not a limit"),
        (["limits", "llama", "--set", "=30s"], "'=30s' is not a limit"),
        (
            ["limits", "llama", "--set", "data=0.01s"],
            "'data=0.01s' is too short: the least is 0.1s",
        ),
        (
            ["limits", "llama", "--set", "data=9999999h"],
            "is too long: the most is 366 days, 31622400s",
        ),
        (["control", "set", "brake"], "'brake' is not a change: write NAME=VALUE"),
        (["control", "set", "brake=on", "brake=off"], "'brake' is there more than once: give it"),
        (["node", "exclude", "n1", "--for", "2h", "--for-good"], "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anybody_is_asked(
    api: Api, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main([*arguments, "--api", api.url]) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert api.asked == []


def test_programs_get_a_record(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "llama", "--api", api.url, "-o", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "everstep.decided/v1"
    assert (record["job"], record["by"], record["text"]) == ("llama", ME, TEXT)
    assert api.asked[0][1]["reason"] == "no reason given"


@pytest.mark.parametrize(
    ("status", "code"), [(404, Exit.NOT_FOUND), (409, Exit.ERROR), (503, Exit.UNREACHABLE)]
)
def test_a_no_is_one_line_and_its_code(
    api: Api, capsys: pytest.CaptureFixture[str], status: int, code: Exit
) -> None:
    api.status, api.problem = status, "there is no job vitt; did you mean vit?"
    assert main(["stop", "vitt", "--api", api.url]) == code
    assert capsys.readouterr() == ("", f"everstep: {api.problem}\n")


def test_without_any_control_plane_it_says_how_to_name_one(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "llama"]) == Exit.UNREACHABLE
    assert capsys.readouterr().err == (
        "everstep: no control plane is known: start one with `everstep up`, or name it with "
        "--api URL, url in [client] or url in [bus]\n"
    )


def test_an_api_that_is_away_is_named_when_no_bus_can_take_its_place(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "llama", "--api", "http://127.0.0.1:9"]) == Exit.UNREACHABLE
    said = capsys.readouterr().err
    assert said.startswith("everstep: the API at http://127.0.0.1:9 cannot be reached")
    assert len(said.splitlines()) == 1


def test_a_bus_that_is_away_is_named(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_BUS__URL", "nats://127.0.0.1:9")
    monkeypatch.setenv("EVERSTEP_BUS__CONNECT_WITHIN_S", "0.5")
    assert main(["stop", "llama"]) == Exit.UNREACHABLE
    assert "nats://127.0.0.1:9" in capsys.readouterr().err
    assert main(["drain", "n1"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert said == "everstep: name the job of n1 with --job: only the API knows\n"
