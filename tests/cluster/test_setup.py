"""The guide for three servers, as an operator follows it: three folders, and one command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restarts.buses import certificates
from everstep.bus.server.dev_server import find_program
from everstep_services.cli.machine.bus_diagnosis import examine_servers, examine_streams
from everstep_services.cli.machine.rank_diagnosis import Level
from tests.e2e.ports import free_port
from tests.waiting import until

_FIRST, _SLICE = 17_000, 4
"""Ports that no other test uses: three for each slice of `free_port`, and those above them."""


def everstep(*words: str, **environ: str) -> str:
    command = [sys.executable, "-m", "everstep_services.cli", *words]
    result = subprocess.run(
        command,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check="doctor" not in words,
    )
    return result.stdout + result.stderr


@contextmanager
def server(config: Path) -> Iterator[None]:
    command = [find_program(), "-c", str(config), "-l", str(config.with_suffix(".log"))]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.kill()


def test_three_servers_by_the_guide(tmp_path: Path) -> None:
    first = _FIRST + free_port() % 5000 // 100 * _SLICE
    members = [f"127.0.0.1:{first + number}" for number in range(3)]
    tls = certificates(tmp_path / "tls")
    said = everstep(
        "bus", "setup", "--cluster", ",".join(members), "--tls", str(tls),
        "--keys", str(tmp_path / "keys"), "--write", str(tmp_path / "nats.json"),
        "--store", str(tmp_path / "store"), "--listen", "127.0.0.1:4222",
    )  # fmt: skip
    configs = sorted(tmp_path.glob("nats-*.json"))
    assert [json.loads(config.read_text())["server_name"] for config in configs] == [
        member.replace(":", "-") for member in members
    ]
    assert {config.stat().st_mode & 0o777 for config in configs} == {0o600}
    url = next(line.split("=")[1].split(", ")[0] for line in said.splitlines() if "__URL=" in line)
    environ = {
        "EVERSTEP_BUS__URL": url,
        "EVERSTEP_BUS__CA_FILE": str(tls / "ca.pem"),
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(tmp_path / "keys" / "admin.creds"),
        "EVERSTEP_BUS__REPLICAS": "3",
    }

    def made() -> str | None:
        try:
            return everstep("bus", "init", "--replicas", "3", **environ)
        except subprocess.CalledProcessError:
            return None  # the servers are still finding each other

    with ExitStack() as stack:
        for config in configs:
            stack.enter_context(server(config))
        assert "FACTS" in until(made, "the streams are made")
        text = until(
            lambda: everstep("doctor", "--keys", str(tmp_path / "keys"), **environ),
            "doctor sees three servers",
            holds=lambda text: "3 servers, all copies of 14 streams are current" in text,
        )
    (leader,) = re.findall("(\\S+) leads, say", text)
    assert leader in {member.replace(":", "-") for member in members}
    assert text.count("the store syncs each write on") == 1


def stream(name: str, copies: int = 3, **group: Any) -> dict[str, Any]:
    replicas = [{"name": server, "current": True} for server in ("b", "c")]
    cluster = {"leader": "a", "replicas": replicas, **group}
    return {"config": {"name": name, "num_replicas": copies}, "cluster": cluster}


_AWAY = [{"name": "b", "current": False, "offline": True}, {"name": "c", "current": True}]
_SILENT = [{"name": "b", "current": False, "active": 20 * 10**9}, {"name": "c", "current": True}]
_UNHEARD = [{"name": "b", "current": False, "active": 0}, {"name": "c", "current": True}]
"""As a leader tells it that was elected after the server had gone."""
_SLOW = [{"name": "b", "current": True, "lag": 5000}, {"name": "c", "current": True}]


@pytest.mark.parametrize(
    ("streams", "missing", "level", "text"),
    [
        ([stream("FACTS")], [], Level.OK, "3 servers, all copies of 1 streams are current"),
        ([stream("FACTS"), stream("LOGS", 1)], [], Level.WARNING, "fewer than 3 copies: LOGS"),
        ([stream("FACTS", replicas=_AWAY)], [], Level.WARNING, "b is away: its copies of FACTS"),
        ([stream("FACTS", replicas=_SILENT)], [], Level.WARNING, "b is away: its copies of FACTS"),
        (
            [stream("FACTS", replicas=_UNHEARD), stream("LOGS", replicas=_SILENT)],
            [],
            Level.WARNING,
            "b is away: its copies of FACTS, LOGS",
        ),
        ([stream("FACTS", replicas=_SLOW)], [], Level.WARNING, "b lags: its copies of FACTS"),
        ([stream("LOGS")], ["FACTS"], Level.CRITICAL, "no leader: FACTS; nothing can be written"),
    ],
)
def test_what_the_copies_of_streams_tell(
    streams: list[dict[str, Any]], missing: list[str], level: Level, text: str
) -> None:
    found = examine_streams(streams, missing, 3)
    assert found[0].level is level
    assert text in found[0].text
    assert len(found) == 1 or " lags" not in found[1].text


def report(leader: str, **config: Any) -> dict[str, Any]:
    return {"meta_cluster": {"leader": leader}, "config": config}


_ALWAYS: dict[str, Any] = {"sync_always": True}
_AT_TIMES: dict[str, Any] = {"sync_interval": 120 * 10**9}


@pytest.mark.parametrize(
    ("reports", "levels", "text"),
    [
        ({"a": report("a", **_ALWAYS)}, [Level.OK, Level.OK], "a leads, say a"),
        ({}, [Level.UNKNOWN], "no server answered the operator"),
        ({"a": report("", **_ALWAYS)}, [Level.CRITICAL, Level.OK], "nobody leads, say a"),
        (
            {"a": report("a", **_AT_TIMES), "b": report("b", **_ALWAYS)},
            [Level.WARNING, Level.WARNING],
            "the store syncs every 120 s on a; the store syncs each write on b",
        ),
        ({"alone": {"config": _ALWAYS}}, [Level.OK], "the store syncs each write on alone"),
    ],
)
def test_what_each_server_says(
    reports: dict[str, dict[str, Any]], levels: list[Level], text: str
) -> None:
    found = examine_servers(reports)
    assert [diagnosis.level for diagnosis in found] == levels
    assert text in [diagnosis.text for diagnosis in found]


def test_one_server_has_no_copies_to_look_at() -> None:
    alone = {"config": {"name": "FACTS", "num_replicas": 1}}
    assert examine_streams([alone], [], 1) == []
