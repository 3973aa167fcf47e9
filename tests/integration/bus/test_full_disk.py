"""A disk is really full, the server's or our own: refusals are reported, and nothing is lost."""

import asyncio
import errno
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError, FactsWaitingError, SpoolWriteError
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.messages import NodeBeat
from tests.integration.bus.facts import beat, ended, numbers, settings_of
from tests.waiting import until_async


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(settings_of(nats), "test", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        yield bus


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for little; only root may mount one."""
    folder = tmp_path / "small"
    (folder / "nats" / "store").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder / "nats" / "store")]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted: {made.stderr.strip() or 'not root'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder / "nats" / "store")], check=True)


async def fill(bus: NatsBus, log: Path) -> None:
    """Until the server takes no more, which `/healthz` shows; a slow answer alone is not that."""
    for number in range(200):
        await bus.record(msgspec.structs.replace(ended(number), reason="x" * 500_000))
        try:
            await bus.flush(0.5)
        except FactsWaitingError as error:
            assert "safe in the spool" in str(error)
            try:
                await bus.prove()
            except BusError:
                if b"no space left on device" in await asyncio.to_thread(log.read_bytes):
                    return
    raise AssertionError("the disk is not full")


@pytest.mark.timeout(180)  # the server waits long before it says that it takes no more
async def test_a_full_disk_of_the_server_is_said_and_loses_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    """The disk is enlarged, and every fact is there (A14.4)."""
    async with dev_server(small_disk) as nats:
        settings = settings_of(nats, request_within_s=1.0)
        async with connect(settings, "test", spool=tmp_path / "spool") as bus:
            await topology.init(bus.jetstream)
            await bus.prove()
            await fill(bus, small_disk / "nats" / "nats.log")
            more = ["mount", "-o", "remount,size=400m", str(small_disk / "nats" / "store")]
            await asyncio.to_thread(subprocess.run, more, check=True)
            await bus.flush(60)  # it takes no more before it was started again, and it is
            assert nats.restarts
            found = await numbers(bus, 10)
            assert found == list(range(len(found)))
            info = await bus.jetstream.api("STREAM.INFO.FACTS")
            assert info["state"]["messages"] == bus.statistics()["facts_recorded_total"]


async def test_a_server_that_dies_on_a_full_disk_is_started_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, refused = threading.Event(), threading.Event()

    def written(server: DevServer) -> None:
        if full.is_set():
            refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(server)

    plain = DevServer._prepare
    monkeypatch.setattr(DevServer, "_prepare", written)
    async with dev_server(tmp_path) as nats, connect(settings_of(nats), "test") as bus:
        full.set()
        os.kill(nats.pid, signal.SIGKILL)
        await until_async(refused.is_set, "its configuration could not be written")
        full.clear()
        await until_async(lambda: nats.restarts, "it was started again")
        await bus.wait_connected()


async def test_on_a_full_disk_of_our_own_facts_are_refused_and_beats_go_on(
    small_disk: Path, nats: DevServer, bus: NatsBus
) -> None:
    disk = small_disk / "nats" / "store"
    ballast = disk / "ballast"
    async with (
        connect(settings_of(nats), "full", spool=disk / "spool") as full,
        bus.subscribe(subjects.beat("j"), NodeBeat) as heard,
    ):
        await full.record(ended(1))
        with pytest.raises(OSError, match="No space left"):
            await asyncio.to_thread(ballast.write_bytes, b"x" * (32 << 20))
        with pytest.raises(SpoolWriteError, match="No space left on device. Free space there"):
            for number in range(100):  # what is left of a page may still take some
                await full.record(ended(-number))
        full.send(subjects.beat("j", "n"), beat(7))
        assert (await heard.get()).sequence == 7
        await asyncio.to_thread(ballast.unlink)
        await full.record(ended(2))
        await full.flush(40)
        kept = int(full.statistics()["facts_recorded_total"])
    found = [number for number in await numbers(bus, kept) if number > 0]
    assert found == [1, 2]


async def test_a_spool_that_cannot_note_what_was_sent_goes_on(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    noted = tmp_path / "own" / "acked"
    async with connect(settings_of(nats), "own", spool=noted.parent) as own:
        await own.record(ended(1))
        await own.flush(40)
        noted.rename(noted.with_name("aside"))
        noted.mkdir()  # nobody can write that, root neither
        await own.record(ended(2))
        await own.flush(30)
        noted.rmdir()
        noted.with_name("aside").rename(noted)
        await own.record(ended(3))
        await own.flush(30)
    assert await numbers(bus, 3) == [1, 2, 3]
