"""The history service as it is run: started, asked, cut off from the bus, stopped."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.server.dev_server import DevServer
from tests.e2e.ports import free_port
from tests.unit.history.facts import delivered, make
from tests.waiting import until_async

WITHIN_S = 80.0
pytestmark = pytest.mark.timeout(600)  # a process takes long to start on a loaded machine


class Service:
    """A running history service."""

    def __init__(self, process: Process, url: str, metrics_url: str, token_file: Path) -> None:
        self.process = process
        self.url = url
        self.metrics_url = metrics_url
        self._token_file = token_file

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        """A client for it, once it answers."""
        async with httpx2.AsyncClient(base_url=f"{self.url}/api/v1", timeout=30) as client:
            await until_async(
                lambda: self._answers(client),
                "it answers",
                despite=(OSError, httpx2.HTTPError),
                within_s=WITHIN_S,
            )
            yield client

    async def _answers(self, client: httpx2.AsyncClient) -> bool:
        assert self.process.returncode is None, "it ended"
        token = await asyncio.to_thread(self._token_file.read_text)
        client.headers["Authorization"] = f"Bearer {token.strip()}"
        return (await client.get("status")).is_success


@pytest.fixture
def environ(nats: DevServer, sqlite_url: str, tmp_path: Path) -> Mapping[str, str]:
    bus = nats.settings("service")
    ours = {
        "EVERSTEP_BUS__URL": bus.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(bus.credentials_file),
        "EVERSTEP_HISTORY__DATABASE_URL": sqlite_url,
        "EVERSTEP_API__PORT": "0",
        "EVERSTEP_API__FIRST_TOKEN_FILE": str(tmp_path / "token"),
        "EVERSTEP_OBSERVE__PORT": "0",
        "EVERSTEP_BUS__PING_INTERVAL_S": "3600",  # of agents: services have a shorter one
    }
    return {**{k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}, **ours}


@pytest.fixture
async def service(
    environ: Mapping[str, str], nats: DevServer, tmp_path: Path
) -> AsyncIterator[Service]:
    async with connect(nats.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
    api, metrics = free_port(), free_port()
    ports = {"EVERSTEP_API__PORT": str(api), "EVERSTEP_OBSERVE__PORT": str(metrics)}
    process = await run({**environ, **ports})
    here = "http://127.0.0.1"
    yield Service(process, f"{here}:{api}", f"{here}:{metrics}/metrics", tmp_path / "token")
    if process.returncode is None:
        process.kill()
        await process.wait()


async def run(environ: Mapping[str, str], *arguments: str) -> Process:
    command = [sys.executable, "-m", "everstep_services.history", *arguments]
    return await asyncio.create_subprocess_exec(*command, env=environ, stdout=PIPE, stderr=PIPE)


async def finished(process: Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def shown(client: httpx2.AsyncClient, count: int) -> list[Any]:
    """All facts, once there are `count`."""

    async def items() -> list[Any]:
        return list((await client.get("facts")).json()["items"])

    return await until_async(items, f"{count} facts", holds=lambda found: len(found) >= count)


async def bus_event(lines: AsyncIterator[str]) -> Any:
    """The data of the next event that tells how the bus is."""
    async with asyncio.timeout(WITHIN_S):
        async for line in lines:
            if line == "event: bus":
                return json.loads((await anext(lines)).removeprefix("data: "))
    raise AssertionError("the stream has ended")


async def fleet_page(service: Service, token: str) -> str:
    """The first page of the dashboard, as a person sees it who logs in now."""
    async with httpx2.AsyncClient(base_url=service.url, timeout=WITHIN_S) as browser:
        await browser.post("/login", data={"token": token}, headers={"Origin": service.url})
        return (await browser.get("/")).text


async def test_a_fact_on_the_bus_is_an_answer_also_when_the_bus_is_gone(
    service: Service, nats: DevServer
) -> None:
    """REST of a real process answers while NATS is down (A11.2)."""
    facts = [make("rank_exited", rank=rank) for rank in range(20)]
    async with service.client() as client, connect(nats.settings("service"), "sender") as sender:
        for fact in facts:
            subject = subjects.fact(fact.job, "rank_exited")
            await sender.jetstream.publish(subject, delivered(fact, 0).data)
        assert [item["id"] for item in await shown(client, 20)] == [fact.id for fact in facts]
        assert (await client.get("status")).json()["is_bus_connected"]

        await nats.stop()
        assert (await client.get("jobs/j")).json()["facts"] == 20

        async def status() -> dict[str, Any]:
            return dict((await client.get("status")).json())

        await until_async(status, "it knows", holds=lambda found: not found["is_bus_connected"])
        metrics = await client.get(service.metrics_url)
        assert "everstep_history_facts_total 20.0" in metrics.text

        async with client.stream("GET", "facts/stream", params={"after": 19}) as live:
            assert live.status_code == 200
            lines = live.aiter_lines()
            async with asyncio.timeout(WITHIN_S):
                while facts[19].id not in await anext(lines):
                    pass
                service.process.terminate()
                async for _ in lines:
                    pass  # the stream ends with the service
    code, _, err = await finished(service.process)
    assert code == 0, err


async def test_a_bus_that_is_frozen_is_noticed_and_told(service: Service, nats: DevServer) -> None:
    """SIGSTOP of NATS: live streams hear of it, and pages have a banner with an age (A11.2)."""
    async with service.client() as client, connect(nats.settings("service"), "sender") as sender:
        fact = make("rank_exited", rank=0)
        subject = subjects.fact(fact.job, "rank_exited")
        await sender.jetstream.publish(subject, delivered(fact, 0).data)
        await shown(client, 1)
        async with client.stream("GET", "facts/stream", timeout=WITHIN_S) as live:
            events = live.aiter_lines()
            os.kill(nats.pid, signal.SIGSTOP)
            try:
                assert await bus_event(events) == {"is_connected": False}
                page = await fleet_page(service, client.headers["Authorization"].split()[1])
            finally:
                os.kill(nats.pid, signal.SIGCONT)
            assert "The bus is away: the record does not grow. The newest fact was written" in page
            assert await bus_event(events) == {"is_connected": True}


async def test_it_waits_for_a_database_that_comes_later(
    environ: Mapping[str, str], postgres_url: str, tmp_path: Path
) -> None:
    database, _, place = postgres_url.partition("?host=")
    later = tmp_path / "later"
    api = free_port()
    changed = {
        "EVERSTEP_HISTORY__DATABASE_URL": f"{database}?host={later}",
        "EVERSTEP_API__PORT": str(api),
    }
    process = await run({**environ, **changed})
    assert process.stderr is not None
    async with asyncio.timeout(WITHIN_S):
        while b"history_waits_for_its_database" not in await process.stderr.readline():
            assert process.returncode is None, "it ended"
    await asyncio.to_thread(later.symlink_to, place)
    service = Service(process, f"http://127.0.0.1:{api}", "", tmp_path / "token")
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(process.stderr.read())  # or a full pipe would stop it
        async with service.client() as client:
            assert (await client.get("facts")).json()["items"] == []
        process.terminate()
        await reading
    assert await process.wait() == 0


@pytest.mark.variant
async def test_it_can_be_stopped_while_it_waits_for_its_database(
    environ: Mapping[str, str], tmp_path: Path
) -> None:
    url = f"postgresql://postgres@/nothing?host={tmp_path / 'nowhere'}"
    process = await run({**environ, "EVERSTEP_HISTORY__DATABASE_URL": url})
    assert process.stderr is not None
    async with asyncio.timeout(WITHIN_S):
        while b"history_waits_for_its_database" not in await process.stderr.readline():
            assert process.returncode is None, "it ended"
    process.terminate()
    assert (await finished(process))[0] == 0


async def test_tokens_and_rebuilds_are_commands(
    environ: Mapping[str, str], sqlite_url: str
) -> None:
    code, out, err = await finished(await run(environ, "token", "--name", "me"))
    assert (code, out.startswith("evs_")) == (0, True), err
    assert await finished(await run(environ, "rebuild")) == (0, "0 facts projected again\n", "")


MENDABLE = [
    ({"EVERSTEP_HISTORY__DATABASE_URL": "mysql://u:hunter2@h/d"}, "is not a database URL"),
    ({"EVERSTEP_HISTORY__DATABASE_UR": "x"}, "did you mean"),
    ({"EVERSTEP_HISTORY__LEASE_TTL_S": "1"}, "three times fetch_within_s"),
    ({"EVERSTEP_HISTORY__DATABASE_URL": "sqlite:////proc/none/h.db"}, "cannot use"),
    ({"EVERSTEP_API__FIRST_TOKEN_FILE": "/proc/none/token"}, "first token cannot be written"),
]
EACH = """
import json, os, sys
from everstep_services.history.__main__ import main
for changed in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        os.environ.update(changed)
        sys.exit(main([]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"exit {code}", file=sys.stderr, flush=True)
"""
"""Forks of one process: what it imports takes a second and more."""


async def test_what_an_operator_can_mend_is_one_line(environ: Mapping[str, str]) -> None:
    changes = json.dumps([changed for changed, _ in MENDABLE])
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", EACH, changes], env=environ, stdout=PIPE, stderr=PIPE
    )
    code, _, err = await finished(process)
    assert code == 0, err
    ends = re.findall(r"(.*?)^exit (-?\d+)$", err, re.DOTALL | re.MULTILINE)
    for (text, ended), (_, said) in zip(ends, MENDABLE, strict=True):
        last = text.strip().splitlines()[-1]
        assert ended == "2", text
        assert last.startswith("history: ")
        assert said in last
    assert "hunter2" not in err
    assert "Traceback" not in err
