"""Logins expire, and are renewed under a live connection: nothing is lost, nobody is cut off."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.job_access import admit
from everstep.bus.auth.keys import Claims, Credentials
from everstep.bus.auth.login import read_credentials
from everstep.bus.auth.roles import LOGINS, SERVICE, agents_name
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError, CredentialsExpiredError, NobodyAnswersError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import LoginRenewed, Message, RenewLogin
from everstep_services.logins.service import opened
from tests.integration.bus.aged_logins import aged_login
from tests.integration.bus.facts import ended, numbers
from tests.integration.bus.servers import granted, refused
from tests.waiting import WITHIN_S, until_async

LEFT_S = 6
"""Of a login that is due to be renewed: a machine may stand for some seconds before it is."""
VALID_S = 12
"""It is renewed when at most 0.6 of it have passed."""
QUICK = {"reconnect_jitter_s": 0.05, "reconnect_wait_s": 0.05, "connect_within_s": WITHIN_S}


@asynccontextmanager
async def renewing(nats: DevServer, valid_s: int = VALID_S) -> AsyncIterator[None]:
    """The logins service, at work."""
    signers = nats.operator.signers.valid_for(valid_s)
    async with opened(signers, nats.settings(SERVICE)) as parts, asyncio.TaskGroup() as tasks:
        (loop,) = parts.loops
        working: asyncio.Task[None] = tasks.create_task(loop())  # type: ignore[arg-type]
        try:
            yield
        finally:
            working.cancel()


async def login_of(nats: DevServer, folder: Path, job: str) -> BusSettings:
    """A login of agents that is due to be renewed, and ends soon."""
    await admit(nats.operator, nats.settings(SERVICE), job)
    path = folder / f"{job}.creds"
    put_login(path, aged_login(nats.operator, agents_name(job), LEFT_S))
    return msgspec.structs.replace(BusSettings(url=nats.url, credentials_file=path), **QUICK)


def put_login(path: Path, login: Credentials) -> None:
    path.write_text(login.text())
    path.chmod(0o600)


async def claims_in(path: Path | None) -> Claims:
    assert path is not None
    found = (await asyncio.to_thread(read_credentials, path)).claims
    assert found is not None
    return found


async def test_a_live_connection_outlives_its_login_and_loses_nothing(
    nats: DevServer, tmp_path: Path
) -> None:
    """A8: facts go on while one login after another would have ended the connection (A13.6)."""
    async with connect(nats.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
    settings = await login_of(nats, tmp_path, "j")
    first = await claims_in(settings.credentials_file)
    async with renewing(nats), connect(settings, "agent", spool=tmp_path / "spool") as agent:
        recorded, ends = 0, [first.exp]

        async def are_over() -> bool:
            nonlocal recorded
            recorded += 1
            await agent.record(ended(recorded))
            newest = (await claims_in(settings.credentials_file)).exp
            if newest != ends[-1]:
                ends.append(newest)
            return len(ends) > 2 and time.time() > ends[1]

        await until_async(are_over, "two logins would have ended it")
        await agent.flush(WITHIN_S)
        counted = agent.statistics()
        assert counted["rebuilds_total"] == 0, "the server has never cut it off"
        assert counted["reconnects_total"] >= 2
        last = await claims_in(settings.credentials_file)
        assert (last.sub, last.name) == (first.sub, first.name)
        assert last.exp > first.exp
    async with connect(nats.settings(SERVICE), "look") as bus:
        assert await numbers(bus, recorded) == list(range(1, recorded + 1))


async def test_a_login_that_nobody_renewed_ends_and_a_new_file_brings_it_back(
    nats: DevServer, tmp_path: Path
) -> None:
    """The client reads the new file by itself (A13.6)."""
    async with connect(nats.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
    settings = await login_of(nats, tmp_path, "j")
    async with connect(settings, "agent", spool=tmp_path / "spool") as agent:
        await until_async(lambda: not agent.connected, "the server has ended it")
        assert isinstance(await refused(settings), CredentialsExpiredError)
        await agent.record(ended(7))
        assert settings.credentials_file is not None
        put_login(settings.credentials_file, nats.operator.login(agents_name("j"), 600))
        await until_async(lambda: agent.connected, "it has read the new one")
        await agent.flush(WITHIN_S)


async def test_a_renewed_login_is_kept_elsewhere_where_its_file_cannot_be_written(
    nats: DevServer, tmp_path: Path
) -> None:
    settings = await login_of(nats, tmp_path, "j")
    kept = tmp_path / "own" / "renewed.creds"
    kept.parent.mkdir()
    settings = msgspec.structs.replace(settings, renewed_credentials_file=kept)
    first = await claims_in(settings.credentials_file)
    async with renewing(nats, 600), connect(settings, "agent") as agent:
        await until_async(kept.exists, "it has been renewed")
        await until_async(lambda: agent.statistics()["reconnects_total"], "and is used")
    assert (await claims_in(settings.credentials_file)).exp == first.exp
    await until_async(lambda: time.time() > first.exp, "the first one is over")
    async with connect(settings, "again"):
        pass


async def test_services_renew_their_login_alike(nats: DevServer) -> None:
    """A service's first login ends, and its connection is not rebuilt (A13.6)."""
    settings = nats.settings(SERVICE)
    assert settings.credentials_file is not None
    put_login(settings.credentials_file, aged_login(nats.operator, SERVICE, LEFT_S))
    first = await claims_in(settings.credentials_file)
    async with renewing(nats):
        async with connect(msgspec.structs.replace(settings, **QUICK), "service") as bus:
            await until_async(lambda: time.time() > first.exp + 1, "its first login is over")
            assert bus.statistics()["rebuilds_total"] == 0
        assert (await claims_in(settings.credentials_file)).exp > first.exp


async def asked(bus: NatsBus, job: str, token: str) -> Message:
    return await bus.ask(
        LOGINS, "renew", RenewLogin(job=job, token=token), LoginRenewed, job=job, within_s=WITHIN_S
    )


async def test_nobody_gets_the_login_of_another_job(nats: DevServer, tmp_path: Path) -> None:
    """An agent asks for another job's login, and is refused (A13.2)."""
    settings = await granted(nats, "a")
    of_b = nats.operator.login(agents_name("b")).token
    async with renewing(nats), connect(settings, "agent") as agent:

        async def refused() -> AskRefusedError:
            with pytest.raises(AskRefusedError, match="does not belong to job a") as caught:
                await asked(agent, "a", of_b)
            return caught.value

        refusal = await until_async(refused, "the service is there", despite=NobodyAnswersError)
        assert refusal.code == "403"
        for token in ("", "x.y.z", nats.operator.login(SERVICE).token):
            with pytest.raises(AskRefusedError):
                await asked(agent, "a", token)
