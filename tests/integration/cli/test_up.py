"""`everstep up`, as people run it: real processes, ready or gone, nothing left behind."""

import asyncio
import json
import os
import pty
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from everstep.bus import BusSettings, connect
from everstep.ids import new_id
from everstep.messages import JobEnded
from everstep_services.agent.telemetry.leftover_spools import remember
from everstep_services.cli.stack.services import SERVICES
from tests.e2e import lifeline
from tests.variants import variant
from tests.waiting import until

WITHIN_S = 50
pytestmark = pytest.mark.timeout(180)  # each command is a process that takes seconds to start
Up = Callable[..., "subprocess.Popen[str]"]


def environment(home: Path) -> dict[str, str]:
    """Nothing of the person who runs the tests."""
    own = {"HOME": str(home), "EVERSTEP_STATE_DIR": str(home / "state")}
    return {**lifeline.bare_environment(), **own}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def everstep(
    *arguments: str, environ: dict[str, str], cwd: Path
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "everstep_services.cli", *arguments], env=environ, cwd=cwd,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(environ: dict[str, str], tmp_path: Path) -> Run:
    return lambda *arguments: everstep(*arguments, environ=environ, cwd=tmp_path)


def start_up(*arguments: str, environ: dict[str, str], cwd: Path) -> "subprocess.Popen[str]":
    """`everstep up` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "everstep_services.cli", "up", "--port", "0", *arguments],
        env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def up(environ: dict[str, str], tmp_path: Path) -> Iterator[Up]:
    """Start `everstep up`; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        started.append(start_up(*arguments, environ=environ, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ready(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What it tells when everything works."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    told: dict[str, Any] = json.loads(line)
    return told


def get(url: str, token: str | None = None) -> httpx2.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.get(url, headers=headers, trust_env=False, timeout=WITHIN_S)


class Running(NamedTuple):
    """What it told, its state, and how to ask it."""

    told: dict[str, Any]
    state: Path
    run: Run


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests that record no fact and leave its first token."""
    home = tmp_path_factory.mktemp("running")
    own = environment(home)
    process = start_up("-o", "json", environ=own, cwd=home)
    try:
        yield Running(ready(process), home / "state", partial(everstep, environ=own, cwd=home))
    finally:
        process.kill()
        process.communicate()


def wait_gone(pid: int, within_s: float = WITHIN_S) -> None:
    """Until the process has ended; it is not our child. With 0, it must have already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    try:
        assert ended.poll(within_s * 1000), f"{pid} still runs"
    finally:
        os.close(handle)


def test_everything_works_when_it_says_so(running: Running) -> None:
    """Once ready, all checks pass, ports are on loopback, and REST wants a token (A1.2, A13.1)."""
    told, state, run = running
    token = (state / "token").read_text().strip()
    status = get(f"{told['api']}/api/v1/status", token)
    assert status.status_code == 200
    assert get(f"{told['api']}/api/v1/status").status_code == 401
    health = get(f"{told['observe']}/healthz")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    checks = {
        *("attribution.bus", "catalog.bus", "health.bus", "history.bus", "history.database"),
        *("logins.bus", "rendezvous.bus", "straggler.bus"),
    }
    assert set(health.json()["checks"]) == checks
    metrics = get(f"{told['observe']}/metrics").text
    assert "everstep_history_facts_total 0.0" in metrics
    for service in SERVICES:
        assert f'everstep_bus_connected{{of="{service}"}} 1.0' in metrics

    assert told["services"] == list(SERVICES)
    before = ("python", "setup", "nats-server", "streams")
    assert list(told["phases_ms"]) == [*before, *SERVICES, "api"]
    assert told["ready_ms"] == sum(told["phases_ms"].values())
    assert {told[name].rpartition(":")[0] for name in ("api", "observe", "bus")} == {
        "http://127.0.0.1",
        "nats://127.0.0.1",
    }
    for path, mode in ((state, 0o700), (state / "token", 0o600), (state / "up.json", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode

    doctor = run("doctor", "-o", "json")
    levels = {item["check"]: item["level"] for item in json.loads(doctor.stdout)["items"]}
    fine = ("api", "bus", "ports", "nats_server", "clock", "torch")
    assert {levels[name] for name in fine} == {"ok"}
    assert doctor.returncode in {0, 1}  # the machine itself may deserve a warning


def test_the_token_is_shown_once_on_a_terminal(
    up: Up, run: Run, state: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    terminal, end = pty.openpty()
    first = subprocess.Popen(
        [sys.executable, "-m", "everstep_services.cli", "up", "--port", "0"],
        env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    try:
        shown = b""
        while b"ready in" not in shown:
            shown += os.read(terminal, 4096)
        token = (state / "token").read_text().strip()
        assert (
            f"  token      {token}  (shown only now; kept in {state / 'token'})" in shown.decode()
        )
        assert run("down").returncode == 0
        _, err = first.communicate(timeout=WITHIN_S)
    finally:
        first.kill()
        first.communicate()
        os.close(terminal)
    assert token not in err

    second = up()
    assert second.stdout is not None
    said = [second.stdout.readline() for _ in range(8)]
    assert f"  token      in {state / 'token'}\n" in said
    assert token not in "".join(said)


def test_other_processes_are_told_where_the_bus_is(running: Running, run: Run) -> None:
    nothing = run("env")
    assert (nothing.returncode, nothing.stdout) == (4, "")
    assert "no bus is known: `everstep up` is not running" in nothing.stderr

    told, state, _ = running
    assert running.run("env").stdout.splitlines() == [
        f"export EVERSTEP_BUS__URL={told['bus']}",
        f"export EVERSTEP_BUS__CREDENTIALS_FILE={state}/nats/service.creds",
    ]


def test_a_second_one_on_the_same_state_says_so(running: Running) -> None:
    told, state, run = running
    second = run("up", "--port", "0")
    assert (second.returncode, second.stdout, second.stderr) == (
        1,
        "",
        f"everstep: everstep up already runs on {state} (pid {told['pid']}): stop it with "
        f"`everstep down`, or use another --state-dir\n",
    )
    assert get(f"{told['observe']}/livez").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, variant(signal.SIGTERM)])
def test_one_signal_to_the_terminal_stops_everything(up: Up, state: Path, number: int) -> None:
    process = up("-o", "json")
    told = ready(process)
    os.killpg(process.pid, number)  # as Ctrl-C: the whole foreground group gets it
    out, err = process.communicate(timeout=WITHIN_S)
    said = [line for line in err.splitlines() if "loop_blocked" not in line]  # a busy machine is
    assert (out, said, process.returncode) == ("", [], 0)
    wait_gone(told["bus_pid"], within_s=0)
    assert not (state / "up.json").exists()


def test_killed_it_leaves_no_server_and_nobody_waits_for_its_leases(
    up: Up, run: Run, state: Path, environ: dict[str, str]
) -> None:
    environ["EVERSTEP_HISTORY__LEASE_TTL_S"] = "3600"
    process = up("-o", "json")
    told = ready(process)
    asyncio.run(record(told, state, "before"))
    shown(run, "before")
    process.kill()
    process.communicate()
    wait_gone(told["bus_pid"])
    status = run("status")
    assert status.returncode == 4
    assert "everstep up is not running" in status.stderr
    asyncio.run(record(ready(up("-o", "json")), state, "after"))
    shown(run, "after")


def shown(run: Run, job: str) -> None:
    """Until a fact of the job is on record."""
    listed = ["facts", "--job", job, "-o", "name"]
    until(lambda: run(*listed).stdout, f"a fact of {job} is shown")


def test_stopped_from_elsewhere_it_has_written_its_token_into_no_log(
    up: Up, run: Run, state: Path
) -> None:
    """Others may read what `everstep up` is redirected to."""
    process = up()
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(8)]
    token = (state / "token").read_text().strip()
    assert f"  token      in {state / 'token'}\n" in said
    status = json.loads(run("status", "-o", "json").stdout)
    assert status["pid"] == process.pid
    assert status["api"] in "".join(said)
    assert status["history"]["is_bus_connected"] is True
    down = run("down")
    assert (down.returncode, down.stdout) == (0, "")
    assert down.stderr == f"stopped everstep up on {state} (pid {process.pid})\n"
    out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert token not in "".join(said) + out + err
    again = run("down")
    assert (again.returncode, again.stderr) == (0, f"nothing runs on {state}\n")


def test_in_the_background(run: Run, state: Path) -> None:
    try:
        started = run("up", "--detach", "--port", "0", "-o", "json")
        assert started.returncode == 0, started.stderr
        told = json.loads(started.stdout)
        assert get(f"{told['observe']}/healthz").status_code == 200
        assert stat.S_IMODE((state / "up.log").stat().st_mode) == 0o600
        second = run("up", "--detach", "--port", "0")
        assert second.returncode == 1
        assert second.stderr.startswith("everstep: up failed: everstep up already runs on")
        assert second.stdout == ""
    finally:
        down = run("down")
    assert down.returncode == 0
    wait_gone(told["bus_pid"], within_s=0)


def test_a_port_that_is_taken_is_one_clear_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = run("up", "--port", str(port))
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        f"everstep: cannot listen on 127.0.0.1:{port}: something else listens there already; "
        f"choose another with --port PORT, or --port 0 for any that is free\n"
    )


async def record(told: dict[str, Any], state: Path, job: str) -> str:
    """Say as a service would that a job has ended; the fact's id."""
    settings = BusSettings(url=told["bus"], credentials_file=state / "nats" / "service.creds")
    at = datetime.now(UTC)
    fact = JobEnded(
        id=new_id(), job=job, at=at, source="test", state="done", exit_code=0, reason="all steps"
    )
    async with connect(settings, "test", spool=state / "spool") as bus:
        await bus.record(fact)
        await bus.flush(WITHIN_S)
    return fact.id


async def leave(told: dict[str, Any], folder: Path) -> None:
    """Facts in a spool, as an agent leaves them that ends while its bus is away."""
    settings = BusSettings(
        url=told["bus"], credentials_file=folder.parents[1] / "nats" / "service.creds"
    )
    at = datetime.now(UTC)
    fact = JobEnded(
        id=new_id(), job="left", at=at, source="test", state="done", exit_code=0, reason="all"
    )
    async with connect(settings, folder.name, spool=folder, wait=False) as bus:
        await bus.record(fact)
    remember(folder, settings)


def test_facts_are_followed_and_kept(
    up: Up, run: Run, state: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """Also those that an agent has left in its spool: the next `everstep up` sends them."""
    first = up("-o", "json")
    told = ready(first)
    command = [sys.executable, "-m", "everstep_services.cli", "facts", "-f", "-o", "jsonl"]
    with subprocess.Popen(
        [*command, "--since", "1h", "--job", "llama"], env=environ, cwd=tmp_path,
        stdout=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        assert follower.stdout is not None
        ids = [asyncio.run(record(told, state, "llama"))]
        asyncio.run(record(told, state, "other"))
        ids.append(asyncio.run(record(told, state, "llama")))
        seen = [json.loads(follower.stdout.readline())["id"] for _ in ids]
        follower.send_signal(signal.SIGINT)
        assert follower.wait(WITHIN_S) == 130
    assert seen == ids

    assert run("down").returncode == 0
    first.communicate(timeout=WITHIN_S)
    asyncio.run(leave(told, state / "spool" / "agent-left-n1"))
    ready(up("-o", "json"))
    shown(run, "left")
    assert run("bus", "flush", "-o", "json").returncode == 0
    listed = run("facts", "--job", "llama", "-o", "name")
    assert (listed.returncode, listed.stdout.split()) == (0, ids)
    newest = json.loads(run("facts", "--job", "llama", "-n", "1", "-o", "json").stdout)
    assert newest["schema"] == "everstep.fact/v1"
    assert [item["id"] for item in newest["items"]] == ids[-1:]


def test_tokens_end_to_end(running: Running, tmp_path: Path) -> None:
    told, state, run = running
    made = run("token", "create", "bob", "--scope", "read", "--expires", "1d")
    token = made.stdout.strip()
    assert get(f"{told['api']}/api/v1/status", token).status_code == 200
    file = tmp_path / "bob"
    file.write_text(token)
    denied = run("token", "ls", "--token-file", str(file))
    assert denied.returncode == 6
    listed = json.loads(run("token", "ls", "-o", "json").stdout)["items"]
    (bob,) = [item for item in listed if item["name"] == "bob"]
    assert run("token", "revoke", bob["id"]).returncode == 0
    assert run("token", "revoke", bob["id"]).returncode == 3
    assert run("status", "--token-file", str(file)).returncode == 6

    database = f"sqlite:///{state / 'history.db'}"
    first = run("token", "create", "ops", "--scope", "admin", "--database", database)
    assert get(f"{told['api']}/api/v1/tokens", first.stdout.strip()).status_code == 200


def test_a_first_token_that_was_revoked_is_replaced_as_the_error_says(
    up: Up, run: Run, state: Path, environ: dict[str, str]
) -> None:
    ready(up("-o", "json"))
    first = json.loads(run("token", "ls", "-o", "json").stdout)["items"][0]["id"]
    assert run("token", "revoke", first).returncode == 0
    refused = run("status")
    assert refused.returncode != 0
    _, _, command = refused.stderr.strip().rpartition("where the database of history is: everstep ")
    made = subprocess.run(
        f"{shlex.quote(sys.executable)} -m everstep_services.cli {command.replace('NAME', 'me')}",
        shell=True, env=environ, check=True, timeout=WITHIN_S, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert b"with scope admin for me" in made.stderr
    assert run("status").returncode == 0


def test_without_anything_running(run: Run) -> None:
    for command in (["facts"], ["token", "ls"], ["status"]):
        done = run(*command)
        assert done.returncode == 4
        assert len(done.stderr.splitlines()) == 1
    doctor = run("doctor", "-o", "json")
    levels = {item["check"]: item["level"] for item in json.loads(doctor.stdout)["items"]}
    assert (levels["api"], levels["bus"]) == ("warning", "warning")
    assert doctor.returncode == 1
