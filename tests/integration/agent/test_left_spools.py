"""Facts of a process that ended while its bus was away are sent by the next process."""

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from everstep.bus import BusSettings, connect, topology
from everstep.bus.errors import SpoolBusyError
from everstep.bus.facts.spool import Spool
from everstep.bus.server.dev_server import DevServer
from everstep_services.agent.telemetry.leftover_spools import LOGIN, SentSpool, remember, send_left

WITHIN_S = 30.0


def leave(folder: Path, settings: BusSettings | None, records: int = 3) -> Path:
    """A spool that some process has left, with facts in it."""
    spool = Spool.open(folder)
    subject = "es.fact.j.job_ended"
    spool.append([f"{subject}\n{number:032x}\n{{}}".encode() for number in range(records)])
    spool.close()
    if settings is not None:
        remember(folder, settings)
    return folder


@pytest.fixture
async def spools(nats: DevServer, tmp_path: Path) -> Path:
    """Where processes keep their spools; the bus has its streams."""
    async with connect(nats.settings("admin"), "test") as bus:
        await topology.init(bus.jetstream)
    return tmp_path / "spool"


async def left(folder: Path, settings: BusSettings | None) -> Path:
    return await asyncio.to_thread(leave, folder, settings)


async def sent(spools: Path) -> list[SentSpool]:
    return [one async for one in send_left(spools, WITHIN_S)]


async def test_every_spool_is_sent_with_its_own_login(nats: DevServer, spools: Path) -> None:
    await left(spools / "agent-a-n", nats.settings("service"))
    await left(spools / "agent-b-n", nats.settings("admin"))
    assert [(one.spool, one.error) for one in await sent(spools)] == [
        ("agent-a-n", ""),
        ("agent-b-n", ""),
    ]
    assert await sent(spools) == []


async def test_what_cannot_be_sent_stays_and_says_why(nats: DevServer, spools: Path) -> None:
    settings = nats.settings("service")
    unknown = await left(spools / "a", None)
    torn = await left(spools / "b", settings)
    await asyncio.to_thread((torn / LOGIN).write_text, "{")
    await left(spools / "c", settings)
    first, second, third = await sent(spools)
    assert "does not say how its process logged in" in first.error
    assert str(torn / LOGIN) in second.error
    assert third.error == ""
    for folder in (unknown, torn):
        await asyncio.to_thread(remember, folder, settings)
    assert [one.error for one in await sent(spools)] == ["", ""]


async def test_a_spool_in_use_is_left_to_its_process(nats: DevServer, spools: Path) -> None:
    folder = await left(spools / "a", nats.settings("service"))
    spool = await asyncio.to_thread(Spool.open, folder)
    assert await sent(spools) == []
    await asyncio.to_thread(spool.close)
    assert len(await sent(spools)) == 1


async def test_a_process_waits_for_its_spool_while_another_task_looks_at_it(
    nats: DevServer, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an agent does with the spools of services that are just being opened in its process."""
    looking, really_open = await asyncio.to_thread(Spool.open, spools / "health"), Spool.open

    def until_refused(*folder: Any, **bounds: Any) -> Spool:
        try:
            return really_open(*folder, **bounds)
        except SpoolBusyError:
            looking.close()
            raise

    monkeypatch.setattr(Spool, "open", until_refused)
    async with connect(nats.settings("service"), "health", spool=spools / "health"):
        with pytest.raises(SpoolBusyError):
            await asyncio.to_thread(really_open, spools / "health")


async def test_a_spool_is_not_kept_by_a_process_that_was_cancelled_while_it_opened_it(
    nats: DevServer, spools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services that are stopped at their start, and started again in the same process."""
    opens, goes_on, really_open = asyncio.Event(), Event(), Spool.open
    loop = asyncio.get_running_loop()

    def held_up(*folder: Any, **bounds: Any) -> Spool:
        loop.call_soon_threadsafe(opens.set)
        assert goes_on.wait(WITHIN_S)
        return really_open(*folder, **bounds)

    async def run() -> None:
        async with connect(nats.settings("service"), "health", spool=spools / "health"):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "open", held_up)
        starting = asyncio.create_task(run())
        await opens.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        goes_on.set()
    await run()


def test_the_login_is_for_its_user_alone_and_has_no_secret(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hush")
    folder = tmp_path / "a"
    folder.mkdir()
    remember(folder, BusSettings(user="u", password_file=secret))
    assert (folder / LOGIN).stat().st_mode & 0o077 == 0
    assert "hush" not in (folder / LOGIN).read_text()
