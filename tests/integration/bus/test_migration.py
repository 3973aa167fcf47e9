"""A bus of the time of passwords and one account becomes one with accounts; nothing is lost."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.keys import Credentials
from everstep.bus.auth.login import read_credentials
from everstep.bus.auth.roles import agents_name
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusConfigError, BusDeniedError
from everstep.bus.server.config import ServerPlan, move_streams
from everstep.bus.server.dev_server import dev_server
from tests.e2e.ports import free_port
from tests.integration.bus.facts import ended, numbers
from tests.integration.bus.one_account import one_account
from tests.integration.bus.servers import refused, server_with, store_in

FACTS = 20


@asynccontextmanager
async def old_bus(folder: Path, store: Path, job: str) -> AsyncIterator[NatsBus]:
    """The server as it was, with what it keeps."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    config, _ = one_account(folder, job)
    async with server_with(folder, {**config, "jetstream": store_in(store)}) as port:
        settings = BusSettings(
            url=f"nats://127.0.0.1:{port}", user="admin", password_file=folder / "admin.password"
        )
        async with connect(settings, "old", spool=folder / "spool") as bus:
            yield bus


async def filled(bus: NatsBus, job: str) -> dict[str, Any]:
    """What a server of that time held, and when its streams were made."""
    await topology.init(bus.jetstream)
    for number in range(1, FACTS + 1):
        await bus.record(ended(number))
    await bus.flush(60)
    await bus.documents("ROUNDS").put(job, b"round 3", revision=0)
    await bus.documents("LIMITS").put(job, b"limits", revision=0)
    return await made_at(bus)


async def made_at(bus: NatsBus) -> dict[str, Any]:
    listed = await bus.jetstream.api("STREAM.LIST")
    return {
        stream["config"]["name"]: (stream["created"], stream["state"]["last_seq"])
        for stream in listed["streams"]
        if stream["config"]["name"] != "KV_PROBE"
    }


async def test_everstep_up_takes_its_old_state_along(tmp_path: Path, job: str) -> None:
    """Facts and documents of an older bus are there under the new one (A15.3)."""
    state = tmp_path / "state"
    async with old_bus(state / "nats", state / "nats" / "store", job) as bus:
        before = await filled(bus, job)
    old_login = BusSettings(user="admin", password_file=tmp_path / "admin.password")
    await asyncio.to_thread(
        (tmp_path / "admin.password").write_bytes, (state / "nats" / "admin.password").read_bytes()
    )
    for _ in range(2):  # and once more, when there is nothing to be moved any more
        async with dev_server(state) as nats:
            async with connect(nats.settings("service"), "history") as bus:
                assert await numbers(bus, FACTS) == list(range(1, FACTS + 1))
                assert (await bus.documents("ROUNDS").get(job)).data == b"round 3"
                assert await made_at(bus) == before, "so history reads on where it was"
                done = await topology.init(bus.jetstream)
                assert {line.split()[1] for line in done} == {"kept"}
                await bus.prove()
            async with connect(await nats.grant(job), "agent") as agent:
                assert (await agent.documents("LIMITS").get(job)).data == b"limits"
            url = nats.url
            settings = BusSettings(
                url=url, user=old_login.user, password_file=old_login.password_file
            )
            assert isinstance(await refused(settings), BusDeniedError)
    assert not list((state / "nats").glob("*.password"))


async def test_one_command_moves_a_production_bus_over(tmp_path: Path, job: str) -> None:
    store = tmp_path / "js"
    async with old_bus(tmp_path / "old", store, job) as bus:
        before = await filled(bus, job)
    port = free_port()
    words = ["--keys", str(tmp_path / "keys"), "--write", str(tmp_path / "nats.json"),
             "--store", str(store), "--listen", f"127.0.0.1:{port}"]  # fmt: skip
    said = await asyncio.to_thread(everstep, "bus", "setup", *words)
    assert "streams of before" in said
    assert "streams of before" not in await asyncio.to_thread(everstep, "bus", "setup", *words)
    config = json.loads(await asyncio.to_thread((tmp_path / "nats.json").read_text))
    for secret in await asyncio.to_thread(secrets_in, tmp_path / "keys"):
        assert secret not in json.dumps(config)
    async with server_with(tmp_path, {**config, "listen": f"127.0.0.1:{port}"}):
        url = f"nats://127.0.0.1:{port}"
        login, env = tmp_path / "llama.creds", {"EVERSTEP_BUS__URL": url}
        keys = ["--keys", str(tmp_path / "keys")]
        await asyncio.to_thread(
            everstep, "bus", "login", job, "--out", str(login), "--valid", "1h", *keys, **env
        )
        assert login.stat().st_mode & 0o777 == 0o600
        service = BusSettings(url=url, credentials_file=tmp_path / "keys" / "service.creds")
        async with connect(service, "history") as bus:
            assert await numbers(bus, FACTS) == list(range(1, FACTS + 1))
            assert await made_at(bus) == before
        agents = BusSettings(url=url, credentials_file=login)
        async with connect(agents, "agent"):
            pass
        await asyncio.to_thread(everstep, "bus", "revoke", job, *keys, **env)
        assert isinstance(await refused(agents), BusDeniedError)
        text = await asyncio.to_thread(everstep, "bus", "login", job, *keys, **env)
        await asyncio.to_thread(login.write_text, text)
        async with connect(agents, "agent"):
            pass


def everstep(*words: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "everstep_services.cli", *words],
        env={**os.environ, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def secrets_in(folder: Path) -> list[str]:
    seeds = [path.read_text().strip() for path in folder.rglob("*.seed")]
    return [*seeds, *(read_credentials(path).seed for path in folder.rglob("*.creds"))]


def test_streams_are_not_moved_below_a_running_server_nor_over_others(tmp_path: Path) -> None:
    operator = Operator.made(tmp_path / "keys")
    old = tmp_path / "js" / "jetstream" / "$G" / "streams"
    old.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as running:
        plan = ServerPlan(store=tmp_path / "js", port=running.getsockname()[1])
        with pytest.raises(BusConfigError, match="stop the server before"):
            move_streams(plan, operator)
    plan = ServerPlan(store=tmp_path / "js", port=-1)
    (tmp_path / "js" / "jetstream" / operator.control.public / "streams").mkdir(parents=True)
    with pytest.raises(BusConfigError, match="both .* hold streams"):
        move_streams(plan, operator)
    assert old.is_dir()


@pytest.fixture
def setup_of_compose(tmp_path: Path) -> ModuleType:
    """`deploy/docker/everstep_setup.py`, with folders of the test's own for its volumes."""
    path = Path(__file__).parents[3] / "deploy" / "docker" / "everstep_setup.py"
    spec = importlib.util.spec_from_file_location("everstep_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = tmp_path / "run"
    for name in ("keys", "nats", "admin", "service", "agent", "logins", "database"):
        (run / name).mkdir(parents=True)
    vars(module).update(
        SECRETS=run, KEYS=run / "keys", NATS="127.0.0.1",
        PLAN=ServerPlan(store=tmp_path / "store", host="127.0.0.1", port=free_port()),
    )  # fmt: skip
    vars(module)["BUS"] = BusSettings(url=f"nats://127.0.0.1:{module.PLAN.port}")
    return module


async def test_the_containers_setup_lets_in_whom_it_should(
    setup_of_compose: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["everstep-setup"])
    run, port = tmp_path / "run", setup_of_compose.PLAN.port
    for _ in range(2):
        assert await asyncio.to_thread(setup_of_compose.main) == 0
    config = json.loads(await asyncio.to_thread((run / "nats" / "nats.json").read_text))
    async with server_with(tmp_path, {**config, "listen": f"127.0.0.1:{port}"}):
        url = f"nats://127.0.0.1:{port}"
        for name in ("admin", "service", "agent"):
            async with connect(
                BusSettings(url=url, credentials_file=run / name / "bus.creds"), name
            ):
                pass
        toy = (await asyncio.to_thread(read_credentials, run / "agent" / "bus.creds")).claims
        assert toy is not None
        assert toy.name == agents_name("toy")
        monkeypatch.setattr(sys, "argv", ["everstep-setup", "agent", "llama"])
        assert await asyncio.to_thread(setup_of_compose.main) == 0
        printed = Credentials.parsed(capsys.readouterr().out)
        assert printed is not None
        path = tmp_path / "llama.creds"
        path.write_text(printed.text())
        async with connect(BusSettings(url=url, credentials_file=path), "llama"):
            pass
        monkeypatch.setattr(sys, "argv", ["everstep-setup", "revoke", "llama"])
        assert await asyncio.to_thread(setup_of_compose.main) == 0
        error = await refused(BusSettings(url=url, credentials_file=path))
        assert isinstance(error, BusDeniedError)
