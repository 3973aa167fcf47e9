"""compose.yaml as it runs: facts get through, secrets and root do not. `make test-compose`."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep import ids
from everstep.bus import BusSettings, connect
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError
from everstep.messages import JobEnded

ROOT = Path(__file__).parents[2]
ONE_SHOT = {"setup", "bus-init"}
OURS = {"history", "rendezvous", "health"}
LASTING = {"nats", "postgres", *OURS}
PUBLISHED = {("nats", "4222/tcp"), ("history", "7070/tcp")}
API = "/api/v1"

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        "EVERSTEP_TEST_COMPOSE" not in os.environ,
        reason="needs a container engine and the running cluster: `make test-compose` starts it",
    ),
]


@cache
def compose_program() -> tuple[str, ...]:
    """`docker compose`, or the older program of its own."""
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if asked.returncode == 0:
        return ("docker", "compose")
    program = shutil.which("docker-compose")
    assert program is not None, "neither `docker compose` nor docker-compose is installed"
    return (program,)


def call(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def compose(*arguments: str) -> str:
    return call(*compose_program(), *arguments)


def inspect(service: str) -> dict[str, Any]:
    """The engine's own description of a service's container."""
    listed = call(
        *["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.service={service}"],
        *["--filter", f"label=com.docker.compose.project={project()}"],
        *["--filter", "label=com.docker.compose.oneoff=False"],
    )
    described: list[dict[str, Any]] = json.loads(call("docker", "inspect", *listed.split()))
    (container,) = described
    return container


def project() -> str:
    return os.environ.get("COMPOSE_PROJECT_NAME", ROOT.name)


def address(service: str, port: int) -> str:
    return compose("port", service, str(port)).strip()


def in_container(service: str, *command: str) -> str:
    return call("docker", "exec", inspect(service)["Id"], *command)


@pytest.fixture(scope="module")
def token() -> str:
    return in_container("history", "cat", "token").strip()


@pytest.fixture(scope="module")
def password() -> str:
    """That of the bus's user `service`."""
    return in_container("history", "cat", "/run/everstep/service/password").strip()


@pytest.fixture(scope="module")
def bus_url() -> str:
    return f"nats://{address('nats', 4222)}"


@pytest.fixture
def settings(tmp_path: Path, password: str, bus_url: str) -> BusSettings:
    secret = tmp_path / "password"
    secret.write_text(password)
    return BusSettings(
        url=bus_url,
        user="service",
        password_file=secret,
        reconnect_wait_s=0.1,
        reconnect_jitter_s=0.1,
    )


@pytest.fixture
async def bus(settings: BusSettings, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(settings, "test", spool=tmp_path / "spool") as connected:
        yield connected


@pytest.fixture
def api(token: str) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://{address('history', 7070)}{API}"
    with httpx2.Client(base_url=url, headers=headers, timeout=10) as client:
        yield client


def ended(job: str, reason: str) -> JobEnded:
    return JobEnded(
        id=ids.new_id(),
        job=job,
        at=datetime.now(UTC),
        source="test",
        state="failed",
        exit_code=1,
        reason=reason,
    )


async def recorded_of(api: httpx2.Client, job: str, many: int) -> list[str]:
    """The ids of a job's facts, once there are so many."""
    async with asyncio.timeout(30):
        while True:
            answer = await asyncio.to_thread(api.get, "/facts", params={"job": job})
            answer.raise_for_status()
            found = [item["id"] for item in answer.json()["items"]]
            if len(found) >= many:
                return found
            await asyncio.sleep(0.1)


# ---- it works


def test_everything_is_up() -> None:
    for service in LASTING:
        assert inspect(service)["State"]["Health"]["Status"] == "healthy"
        assert inspect(service)["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    for service in ONE_SHOT:
        assert inspect(service)["State"]["ExitCode"] == 0


async def test_a_fact_from_the_host_is_on_record(
    bus: NatsBus, api: httpx2.Client, job: str
) -> None:
    told = ended(job, "from the host")
    await bus.record(told)
    await bus.flush(10)
    assert await recorded_of(api, job, 1) == [told.id]


async def test_agents_of_a_job_can_be_let_in_and_only_they(
    api: httpx2.Client, bus_url: str, job: str, tmp_path: Path
) -> None:
    secret = tmp_path / "agent.password"
    secret.write_text(await asyncio.to_thread(compose, "run", "--rm", "setup", "agent", job))
    await asyncio.to_thread(compose, "kill", "-s", "HUP", "nats")
    settings = BusSettings(url=bus_url, user=f"agent-{job}", password_file=secret)
    async with asyncio.timeout(30), connect(settings, "agent", spool=tmp_path / "spool") as bus:
        told = ended(job, "from its agent")
        await bus.record(told)
        await bus.flush(10)
        with pytest.raises(BusDeniedError):
            await bus.jetstream.api("STREAM.LIST")
    assert await recorded_of(api, job, 1) == [told.id]


# While the server is dead, Docker's proxy accepts and hangs up; nats-py never closes such a socket.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_facts_survive_the_death_of_the_server(
    bus: NatsBus, api: httpx2.Client, job: str
) -> None:
    told = [ended(job, "before"), ended(job, "while it is dead"), ended(job, "after")]
    container = inspect("nats")["Id"]
    await bus.record(told[0])
    await bus.flush(10)
    await asyncio.to_thread(call, "docker", "kill", container)
    await bus.record(told[1])
    await asyncio.to_thread(call, "docker", "start", container)
    await bus.record(told[2])
    await bus.flush(60)
    assert await recorded_of(api, job, 3) == [fact.id for fact in told]


def test_setup_keeps_what_it_made(password: str, token: str) -> None:
    compose("run", "--rm", "setup")
    assert in_container("history", "cat", "/run/everstep/service/password").strip() == password
    assert in_container("history", "cat", "token").strip() == token


# ---- it is closed


def test_only_two_ports_are_published_and_only_on_loopback() -> None:
    published = set()
    for service in LASTING | ONE_SHOT:
        for port, bindings in (inspect(service)["NetworkSettings"]["Ports"] or {}).items():
            for binding in bindings or []:
                assert binding["HostIp"] == "127.0.0.1"
                published.add((service, port))
    assert published == PUBLISHED


async def test_the_bus_refuses_whoever_has_no_password(bus_url: str) -> None:
    with pytest.raises(BusDeniedError):
        async with connect(BusSettings(url=bus_url, connect_within_s=5), "test"):
            pass


@pytest.mark.parametrize("path", ["/jobs", "/facts", "/status", "/tokens", "/openapi.json"])
def test_rest_refuses_whoever_has_no_token(api: httpx2.Client, path: str) -> None:
    with httpx2.Client(base_url=api.base_url) as stranger:
        assert stranger.get(path).status_code == 401
        wrong = {"Authorization": "Bearer evs_000000000000_wrong"}
        assert stranger.get(path, headers=wrong).status_code == 401


def test_no_service_runs_as_root() -> None:
    for service in ("setup", "bus-init", "nats", *OURS):
        assert inspect(service)["Config"]["User"] == "10001:10001"
    for service in LASTING:
        lines = call("docker", "top", inspect(service)["Id"], "-eo", "pid,uid,comm").splitlines()
        owners = {tuple(line.split(maxsplit=2)[1:]) for line in lines[1:]}
        servers = {uid for uid, program in owners if program.startswith(service[:8])}
        assert "0" not in servers, owners
        assert servers or service in OURS, owners


@pytest.mark.parametrize("service", sorted(LASTING | ONE_SHOT))
def test_each_container_is_confined(service: str) -> None:
    host = inspect(service)["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] > 0
    assert host["Privileged"] is False


def test_no_secret_is_in_an_environment_a_command_line_or_a_log(token: str, password: str) -> None:
    database = in_container("history", "cat", "/run/everstep/database/password").strip()
    configured = json.loads(in_container("nats", "cat", "/run/everstep/nats/nats.json"))
    users = configured["authorization"]["users"]
    secrets = {token, password, database, *(user["password"] for user in users)}
    assert len(secrets) >= 4
    for service in LASTING | ONE_SHOT:
        container = inspect(service)
        logged = compose("logs", "--no-color", service)
        said = json.dumps([container["Config"], container["Args"], container["Path"]]) + logged
        assert not [secret for secret in secrets if secret in said], service


def test_each_container_has_only_its_own_secret() -> None:
    mounted = {
        service: {mount["Destination"] for mount in inspect(service)["Mounts"] if mount["Name"]}
        for service in LASTING | {"bus-init"}
    }
    secrets = {
        service: {path.rpartition("/")[2] for path in paths if path.startswith("/run/everstep/")}
        for service, paths in mounted.items()
    }
    assert secrets == {
        "nats": {"nats"},
        "postgres": {"database"},
        "history": {"service", "database"},
        "rendezvous": {"service"},
        "health": {"service"},
        "bus-init": {"admin"},
    }
