"""compose.yaml as it runs: facts get through, secrets and root do not. `make test-compose`."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

from everstep import ids
from everstep.bus import BusSettings, connect
from everstep.bus.auth.keys import Credentials
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError
from everstep.messages import JobEnded
from tests.e2e.compose_cluster import (
    AGENTS,
    LASTING,
    NEEDS_CLUSTER,
    ONE_SHOT,
    OURS,
    address,
    call,
    compose,
    first_token,
    in_container,
    inspect,
    opened_api,
)
from tests.waiting import until_async

PUBLISHED = {("nats", "4222/tcp"), ("history", "7070/tcp")}

pytestmark = NEEDS_CLUSTER


@pytest.fixture(scope="module")
def token() -> str:
    return first_token()


@pytest.fixture
def api() -> Iterator[httpx2.Client]:
    with opened_api() as client:
        yield client


@pytest.fixture(scope="module")
def login() -> str:
    """The file with the login `service` to the bus."""
    return in_container("history", "cat", "/run/everstep/service/bus.creds")


@pytest.fixture(scope="module")
def bus_url() -> str:
    return f"nats://{address('nats', 4222)}"


@pytest.fixture
def settings(tmp_path: Path, login: str, bus_url: str) -> BusSettings:
    secret = tmp_path / "bus.creds"
    secret.write_text(login)
    return BusSettings(
        url=bus_url, credentials_file=secret, reconnect_wait_s=0.1, reconnect_jitter_s=0.1
    )


@pytest.fixture
async def bus(settings: BusSettings, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(settings, "test", spool=tmp_path / "spool") as connected:
        yield connected


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
    """The ids of a job's facts, once there are `count`."""

    async def recorded() -> list[str]:
        answer = await asyncio.to_thread(api.get, "/facts", params={"job": job})
        answer.raise_for_status()
        return [item["id"] for item in answer.json()["items"]]

    return await until_async(recorded, f"{many} facts", holds=lambda found: len(found) >= many)


# ---- it works


def test_everything_is_up() -> None:
    """Every container that stays is healthy, and every other one has succeeded (A1.2)."""
    for service in LASTING:
        assert inspect(service)["State"]["Health"]["Status"] == "healthy"
        assert inspect(service)["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    for service in ONE_SHOT:
        assert inspect(service)["State"]["ExitCode"] == 0


async def test_a_fact_from_the_host_is_on_record(
    bus: NatsBus, api: httpx2.Client, job: str
) -> None:
    """What a client publishes is persisted, and REST returns it (A1.2)."""
    told = ended(job, "from the host")
    await bus.record(told)
    await bus.flush(10)
    assert await recorded_of(api, job, 1) == [told.id]


async def test_agents_of_a_job_can_be_let_in_and_only_they(
    api: httpx2.Client, bus_url: str, job: str, tmp_path: Path
) -> None:
    secret = tmp_path / "agent.creds"
    secret.write_text(await asyncio.to_thread(compose, "run", "--rm", "setup", "agent", job))
    settings = BusSettings(url=bus_url, credentials_file=secret)
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
    """Facts recorded before, during and after the outage arrive in order (A14.1)."""
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


def test_setup_keeps_what_it_made(login: str, token: str) -> None:
    compose("run", "--rm", "setup")
    assert in_container("history", "cat", "/run/everstep/service/bus.creds") == login
    assert in_container("history", "cat", "token").strip() == token


# ---- it is closed


def test_only_two_ports_are_published_and_only_on_loopback() -> None:
    """The API and the bus listen on loopback, and nothing else listens (A13.1)."""
    published = set()
    for service in LASTING | ONE_SHOT:
        for port, bindings in (inspect(service)["NetworkSettings"]["Ports"] or {}).items():
            for binding in bindings or []:
                assert binding["HostIp"] == "127.0.0.1"
                published.add((service, port))
    assert published == PUBLISHED


async def test_the_bus_refuses_whoever_has_no_login(bus_url: str) -> None:
    """NATS lets nobody in without credentials (A13.1)."""
    with pytest.raises(BusDeniedError):
        async with connect(BusSettings(url=bus_url, connect_within_s=5), "test"):
            pass


@pytest.mark.parametrize("path", ["/jobs", "/facts", "/status", "/tokens", "/openapi.json"])
def test_rest_refuses_whoever_has_no_token(api: httpx2.Client, path: str) -> None:
    """REST answers 401 without a token, and with a wrong one (A13.1)."""
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
        is_ours = service in OURS
        servers = {uid for uid, program in owners if is_ours or program.startswith(service[:8])}
        assert servers, owners
        assert "0" not in servers, owners


@pytest.mark.parametrize("service", sorted(LASTING | ONE_SHOT))
def test_each_container_is_confined(service: str) -> None:
    host = inspect(service)["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] > 0
    assert host["Privileged"] is False


def test_no_secret_is_in_an_environment_a_command_line_or_a_log(token: str, login: str) -> None:
    """Tokens, keys and passwords of the cluster are searched for (A13.5)."""
    database = in_container("history", "cat", "/run/everstep/database/password").strip()
    folder, signers = "/run/everstep/logins", ("agents.seed", "services.seed")
    keys = [in_container("logins", "cat", f"{folder}/{name}").strip() for name in signers]
    found = Credentials.parsed(login)
    assert found is not None
    secrets = {token, found.seed, found.token, database, *keys}
    assert len(secrets) == 6
    assert not [
        key for key in keys if key in in_container("nats", "cat", "/run/everstep/nats/nats.json")
    ]
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
        "catalog": {"service"},
        "straggler": {"service"},
        "attribution": {"service"},
        "logins": {"service", "logins"},
        "bus-init": {"admin"},
        **{agent: {"agent"} for agent in AGENTS},
    }
