"""Each fault of a machine is planted, and the doctor names it with a remedy (A1.5)."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from everstep.bus.server.dev_server import find_program
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine import bus_diagnosis, doctor, rank_diagnosis
from everstep_services.cli.machine.rank_diagnosis import Check, Diagnosis, Level
from tests.waiting import until

HAS_NAMESPACES = shutil.which("unshare") is not None and (
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
)
SEVERAL_NODES = {"SLURM_JOB_NUM_NODES": "4"}


def troubles(check: Check, environ: Mapping[str, str], tmp_path: Path) -> list[Diagnosis]:
    """What a check finds wrong, with this in the environment."""
    home = {"HOME": str(tmp_path), **environ}
    found = [one for one in check(Invocation(environ=home)) if one.level is not Level.OK]
    for diagnosis in found:
        assert diagnosis.fix, diagnosis
        assert "\n" not in diagnosis.text + diagnosis.fix
    return found


ENVIRONMENTS: list[tuple[Check, dict[str, str], Level, str]] = [
    (
        rank_diagnosis.network_interface,
        {"GLOO_SOCKET_IFNAME": "nosuch0"},
        Level.CRITICAL,
        "GLOO_SOCKET_IFNAME=nosuch0: this host has no interface nosuch0",
    ),
    (
        rank_diagnosis.network_interface,
        {"NCCL_SOCKET_IFNAME": "nosuch"},
        Level.WARNING,  # without a device nobody asks NCCL
        "NCCL_SOCKET_IFNAME=nosuch: NCCL finds no interface of that name",
    ),
    (
        rank_diagnosis.network_interface,
        {"GLOO_SOCKET_IFNAME": "lo", **SEVERAL_NODES},
        Level.CRITICAL,
        "GLOO_SOCKET_IFNAME=lo is loopback, and this job has several nodes",
    ),
    (
        rank_diagnosis.recorder,
        {"TORCH_FR_BUFFER_SIZE": "0"},
        Level.WARNING,
        "TORCH_FR_BUFFER_SIZE is '0': nothing is recorded",
    ),
    (
        rank_diagnosis.recorder,
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "off"},
        Level.WARNING,
        "TORCH_NCCL_TRACE_BUFFER_SIZE is 'off': nothing is recorded",
    ),
    (
        rank_diagnosis.recorder,
        {"TORCHELASTIC_RUN_ID": "r1"},
        Level.WARNING,
        "TORCH_FR_BUFFER_SIZE is not set, and the launcher is not ours",
    ),
    (
        rank_diagnosis.timeouts,
        {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"},
        Level.WARNING,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60 ends a rank before a stall is found (30 min",
    ),
    (
        rank_diagnosis.timeouts,
        {"EVERSTEP_AGENT__LIMITS": "data=90", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60"},
        Level.WARNING,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60 ends a rank before a stall in data is found (90 s)",
    ),
    (
        rank_diagnosis.timeouts,
        {"EVERSTEP_AGENT__SCHEDULER_GRACE_S": "30"},
        Level.WARNING,
        "--preempt-grace 600 is longer than the scheduler waits (30 s)",
    ),
    (
        rank_diagnosis.timeouts,
        {"EVERSTEP_AGENT__STOP_GRACE_S": "900"},
        Level.WARNING,
        "stop_grace_s (900) is longer than preempt_grace_s (600)",
    ),
    (
        rank_diagnosis.launchers,
        {"TORCHELASTIC_RUN_ID": "r1", "RANK": "3"},
        Level.CRITICAL,
        "torchrun has started this process as a rank (TORCHELASTIC_RUN_ID=r1)",
    ),
    (
        rank_diagnosis.launchers,
        {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"},
        Level.CRITICAL,
        "srun started 16 tasks on 2 nodes, but a node has one agent",
    ),
]


@pytest.mark.parametrize(
    ("check", "environ", "level", "text"),
    ENVIRONMENTS,
    ids=["-".join(environ) for _, environ, _, _ in ENVIRONMENTS],
)
def test_what_the_environment_has_wrong_is_named(
    check: Check, environ: dict[str, str], level: Level, text: str, tmp_path: Path
) -> None:
    """A1.5."""
    found = troubles(check, environ, tmp_path)
    assert any(one.text.startswith(text) and one.level is level for one in found), found


@pytest.mark.parametrize(
    "check", [rank_diagnosis.recorder, rank_diagnosis.timeouts, rank_diagnosis.launchers]
)
def test_where_nothing_is_wrong_nothing_is_found(check: Check, tmp_path: Path) -> None:
    """Nor is an agent for each node of an allocation two launchers (A1.5)."""
    environ = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", **SEVERAL_NODES}
    assert troubles(check, environ, tmp_path) == []


@pytest.mark.parametrize(
    ("addresses", "environ", "level"),
    [
        (["127.0.1.1"], SEVERAL_NODES, Level.CRITICAL),
        (["127.0.1.1"], {"PET_NNODES": "2:4"}, Level.CRITICAL),
        (["127.0.1.1"], {}, None),
        (["127.0.1.1", "10.0.0.7"], SEVERAL_NODES, None),
        (None, SEVERAL_NODES, Level.CRITICAL),
        (None, {}, Level.WARNING),
    ],
)
def test_a_host_name_that_leads_to_loopback_or_nowhere_is_named(
    addresses: list[str] | None,
    environ: dict[str, str],
    level: Level | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A1.5: it matters for jobs of several nodes."""

    def resolved(name: str, *_: object, **__: object) -> list[Any]:
        assert name == "gpu-7"
        if addresses is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    found = troubles(rank_diagnosis.network_interface, environ, tmp_path)
    assert [one.level for one in found] == ([] if level is None else [level])
    assert all("gpu-7" in one.text for one in found)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """A1.5."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = troubles(doctor.ports, {"EVERSTEP_API__PORT": str(port)}, tmp_path)
    assert found.text == f"127.0.0.1:{port}, for the API: Address already in use"
    assert found.fix == "everstep up --port PORT"


def test_an_old_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1.5."""
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\necho 'nats-server: v2.9.1'\n")
    program.chmod(0o755)
    monkeypatch.setattr("everstep.bus.server.dev_server.find_program", lambda: str(program))
    (found,) = troubles(doctor.nats_server, {}, tmp_path)
    assert found.text.startswith(f"{program} is NATS 2.9.1; Everstep needs 2.11 or newer")


def test_a_bus_without_jetstream_is_named(tmp_path: Path) -> None:
    """A1.5."""
    ports = tmp_path / "ports"
    ports.mkdir()
    command = [find_program(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(ports)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            (file,) = until(lambda: list(ports.iterdir()), "the port")
            (url,) = until(lambda: file.read_text() and json.loads(file.read_text())["nats"], "it")
            (found,) = troubles(bus_diagnosis.bus, {"EVERSTEP_BUS__URL": url}, tmp_path)
        finally:
            server.terminate()
    assert found.level is Level.CRITICAL
    assert "JetStream" in found.text


@pytest.fixture
def slow_clock() -> Iterator[str]:
    """An API whose clock is ten minutes behind."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            clocks = [{"node": "node-7", "offset_s": -61.2}]
            self.wfile.write(json.dumps({"wrong_clocks": clocks}).encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            del timestamp
            return format_datetime(datetime.now(UTC) - timedelta(minutes=10), usegmt=True)

        def log_message(self, format: str, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_skewed_clock_is_named(slow_clock: str, tmp_path: Path) -> None:
    """A1.5."""
    token = tmp_path / "token"
    token.write_text("evs_" + "0" * 12 + "_" + "0" * 64)
    token.chmod(0o600)
    environ = {"EVERSTEP_CLIENT__URL": slow_clock, "EVERSTEP_CLIENT__TOKEN_FILE": str(token)}
    found, of_node = troubles(doctor.api, environ, tmp_path)
    assert (found.check, found.level) == ("clock", Level.WARNING)
    assert 590 < int(found.text.partition(" ")[0]) < 660
    assert "chrony" in found.fix
    assert (of_node.check, of_node.level) == ("clock", Level.WARNING)
    assert of_node.text == "the clock of node-7 is 61 s behind the API's"
    assert "chrony" in of_node.fix


@pytest.mark.skipif(not HAS_NAMESPACES, reason="this user may not mount anything")
def test_what_a_container_lacks_is_named(tmp_path: Path) -> None:
    """`/dev/shm` of 64 MiB, a full disk, one without inodes, too few open files (A1.5)."""
    full, crowded = tmp_path / "full", tmp_path / "crowded"
    script = f"""
mkdir {full} {crowded}
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=64m tmpfs {full} && head -c 60m /dev/zero > {full}/data
mount -t tmpfs -o size=64m,nr_inodes=40 tmpfs {crowded} && touch $(seq -f {crowded}/%g 39)
ulimit -n 256
exec {sys.executable} -m everstep_services.cli doctor -o json --state-dir {full}/state
"""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")},
        "HOME": str(tmp_path),
        "EVERSTEP_CHECKS__ROOM_PATHS": str(crowded),
        "EVERSTEP_CHECKS__ROOM_LEAST_MIB": "16",
        "EVERSTEP_CHECKS__ROOM_FAILED_MIB": "8",
    }
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script],
        env=environ, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.stdout, done.stderr
    items = json.loads(done.stdout)["items"]
    bad = {(item["check"], item["level"]): item for item in items if item["level"] != "ok"}
    assert done.returncode == 2
    assert "0.1 GiB" in bad["shared_memory", "warning"]["text"]
    assert bad["shared_memory", "warning"]["fix"].startswith("in a container: --shm-size=16g")
    assert bad["limits", "warning"]["text"] == "only 256 open files (least 4096)"
    assert bad["limits", "warning"]["fix"].startswith("ulimit -n 65536")
    assert bad["state_directory", "critical"]["fix"].startswith("free some space")
    disks = [item["text"] for item in items if item["check"] == "disks" and item["level"] != "ok"]
    assert any(text.startswith(f"{full}/state: 4 MiB are free") for text in disks), disks
    assert any(text.startswith(f"{crowded}: 0 more files fit of 40") for text in disks), disks
    assert all(item["fix"] for item in bad.values())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_that_nobody_may_write_is_named(tmp_path: Path) -> None:
    """A1.5."""
    tmp_path.chmod(0o500)
    environ = {"EVERSTEP_STATE_DIR": str(tmp_path / "state")}
    (found,) = troubles(doctor.state_directory, environ, tmp_path)
    assert (found.level, found.text) == (Level.CRITICAL, f"{tmp_path} is not writable")
