"""A lease outlives its holder only where nobody can know that the holder is dead."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE

import pytest

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.errors import LeaseLostError
from everstep.bus.leases import BUCKET, is_dead, own_identity
from everstep.bus.ports import Held
from everstep.bus.server.dev_server import DevServer

HOLDER = """
import asyncio, json, sys
from pathlib import Path
from everstep.bus import BusSettings, connect

async def main(login, name):
    files = {"password_file", "credentials_file"}
    said = json.loads(login).items()
    settings = BusSettings(**{key: Path(one) if key in files else one for key, one in said})
    async with connect(settings, "holder") as bus:
        held = await bus.leases.acquire(name, "the other", 3600)
        print(held.token, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def held_elsewhere(nats: DevServer, name: str) -> tuple[asyncio.subprocess.Process, int]:
    bus = nats.settings(SERVICE)
    names = ("url", "user", "password_file", "credentials_file")
    login = {name: str(found) for name in names if (found := getattr(bus, name)) is not None}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, json.dumps(login), name), stdout=PIPE
    )
    assert process.stdout is not None
    return process, int(await process.stdout.readline())


async def test_the_lease_of_a_killed_process_is_taken_over_at_once(
    shared_nats: DevServer, job: str
) -> None:
    """The holder lived on this host, so that its death is known (A9.4)."""
    process, token = await held_elsewhere(shared_nats, job)
    async with connect(shared_nats.settings(SERVICE), "next") as bus:
        assert await bus.leases.acquire(job, "us", 60) is None, "it lives"
        process.kill()
        await process.communicate()
        held = await bus.leases.acquire(job, "us", 60)
        assert held is not None
        assert held.token > token
        assert await bus.leases.acquire(job, "a third", 60) is None
        with pytest.raises(LeaseLostError):
            await bus.leases.renew(Held(job, "the other", 3600, token))


@pytest.mark.parametrize(
    "identity",
    ["", "us", "x/y/1/2", own_identity().replace("pid:", "pid;"), "a" * 5000, own_identity()],
    ids=["none", "a word", "elsewhere", "another namespace", "very long", "a live process"],
)
async def test_a_lease_of_whom_nobody_can_know_is_left_alone(
    shared_nats: DevServer, job: str, identity: str
) -> None:
    async with connect(shared_nats.settings(SERVICE), "next") as bus:
        await bus.documents(BUCKET).put(job, f"the other {identity}".encode(), revision=0)
        assert await bus.leases.acquire(job, "us", 60) is None


def test_another_process_with_the_same_id_is_another_one() -> None:
    place, _, started = own_identity().rpartition("/")
    assert not is_dead(own_identity())
    assert is_dead(f"{place}/{int(started) - 1}")
    assert not is_dead(f"{place}/")
    assert os.getpid() == int(place.rpartition("/")[2])
