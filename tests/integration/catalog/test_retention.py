"""What the catalog deletes, what it must keep, and what comes back after a failure."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    CheckpointDeleted,
    CheckpointsCollected,
    CollectCheckpoints,
    ControlDocument,
    DeletionRefused,
)
from everstep.messages.codec import encode
from everstep_services.catalog import maintenance
from everstep_services.catalog.storage_threads import OutOfReachError
from everstep_services.catalog.stores import CheckpointStores
from tests.checkpoint_helpers.checkpoint_shelves import leave
from tests.integration.catalog.job import JOB, change, opened_bus, publish, seen, steps
from tests.integration.catalog.replicas import (
    QUICK,
    at_work,
    formed,
    places,
)
from tests.integration.health.replicas import facts_of
from tests.waiting import until_async
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with opened_bus(nats, tmp_path) as bus:
        yield bus


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be read or deleted is tried again without the minute in between."""
    monkeypatch.setattr(maintenance, "_RETRY_S", 0.1)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


async def test_retention_keeps_the_last_the_pinned_and_what_the_files_pin(
    bus: NatsBus, root: str
) -> None:
    settings = msgspec.structs.replace(QUICK, keep_last=2)
    async with at_work(bus):
        await publish(bus, root, 100, 200, 300)
        await until_async(
            lambda: places(bus, JOB),
            "all are verified",
            holds=lambda all_: len(all_) == 3 and all(one.is_verified for one in all_),
        )
        assert not (await change(bus, "pin", 100)).is_refused
    async with at_work(bus, settings):
        await publish(bus, root, 400, 500)
        await until_async(
            lambda: seen(bus, CheckpointDeleted), "200 and 300 go", holds=lambda s: len(s) == 2
        )
        assert await steps(bus) == [500, 400, 100]
    assert [one.step for one in stored_checkpoints(storage_for(root))] == [500, 400, 100]
    gone = await seen(bus, CheckpointDeleted)
    assert sorted(fact.step for fact in gone) == [200, 300]
    assert all(fact.last_good_step is not None and fact.freed_bytes > 8192 for fact in gone)


async def test_the_brake_holds_retention(bus: NatsBus, root: str) -> None:
    """Nothing is deleted until the brake is off (A15.4)."""
    braked = ControlDocument(
        settings={"catalog.keep_last": "1"}, changed_by="ann", reason="", is_braked=True, modes={}
    )
    key = "_cluster"
    await bus.documents("CONTROL").put(key, encode(braked), revision=0)
    async with at_work(bus) as catalog:
        await publish(bus, root, 100, 200)
        await until_async(
            lambda: places(bus, JOB),
            "both are verified",
            holds=lambda all_: len(all_) == 2 and all(one.is_verified for one in all_),
        )
        assert await catalog.maintenance.rules(JOB) == (await catalog.maintenance.rules(JOB))
        ask = CollectCheckpoints(job=JOB, by="ann", reason="room")
        plan = await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=30)
        assert [(one.step, one.is_kept) for one in plan.judged] == [(200, True), (100, False)]
        assert "nothing was deleted" in plan.text
        assert await steps(bus) == [200, 100]
        free = msgspec.structs.replace(braked, is_braked=False)
        await bus.documents("CONTROL").put(key, encode(free), revision=None)
        await until_async(lambda: steps(bus), "100 goes", holds=lambda found: found == [200])


async def test_what_dead_saves_have_left_goes_with_retention(bus: NatsBus, root: str) -> None:
    dead = leave(root, ".saving/400-r1-0a1b2c3d-7", hours_ago=25)
    of_the_round = leave(root, ".saving/500-r3-0a1b2c3d-8", hours_ago=25)
    young = leave(root, ".saving/500-r2-ffffffff-1", hours_ago=23)
    async with at_work(bus) as catalog:
        await bus.record(formed(JOB, 2, round_=3))
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
        ask = CollectCheckpoints(job=JOB, by="ann", reason="room")
        plan = await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=30)
        assert [(one.step, one.is_kept) for one in plan.judged] == [(100, True), (400, False)]
        assert plan.judged[1].path == str(dead)
        assert "leftovers of failed saves go, too: 1 with 4 B; nothing was deleted" in plan.text
        assert dead.exists()
        ask = msgspec.structs.replace(ask, is_dry_run=False)
        await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=30)
        await until_async(
            lambda: catalog.maintenance.statistics()["swept_total"],
            "what is dead goes",
            holds=lambda count: count == 1,
        )
    assert not dead.exists()
    assert of_the_round.exists()
    assert young.exists()

    again = leave(root, ".saving/400-r1-0a1b2c3d-7", hours_ago=25)
    async with at_work(bus, msgspec.structs.replace(QUICK, keep_last=1, scan_every_s=0.1)):
        await until_async(lambda: not again.exists(), "retention takes it, too", holds=bool)
    assert of_the_round.exists()
    assert young.exists()


async def test_nobody_deletes_the_last_good_one(bus: NatsBus, root: str) -> None:
    """The request is refused, and the files stay (A8.1)."""
    async with at_work(bus):
        await publish(bus, root, 100)
        await until_async(
            lambda: places(bus, JOB),
            "it is verified",
            holds=lambda all_: [one.is_verified for one in all_] == [True],
        )
        done = await change(bus, "delete", 100)
        assert done.is_refused
        assert "it is the last good one" in done.text
        assert await steps(bus) == [100]
        refused = await facts_of(bus, DeletionRefused)
    assert [one.step for one in stored_checkpoints(storage_for(root))] == [100]
    assert [(fact.step, fact.by) for fact in refused] == [(100, "ann")]


async def test_whoever_dies_while_it_deletes_leaves_files_that_the_next_one_finds(
    bus: NatsBus, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleanup that broke off leaves the newest one whole (A8.1)."""

    async def hangs(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    settings = msgspec.structs.replace(QUICK, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStores, "remove", hangs)
        async with at_work(bus, settings):
            await publish(bus, root, 100, 200)
            await until_async(lambda: steps(bus), "100 is forgotten", holds=lambda s: s == [200])
    assert [one.step for one in stored_checkpoints(storage_for(root))] == [200, 100]
    async with at_work(bus, settings):
        await until_async(
            lambda: seen(bus, CheckpointDeleted), "100 is deleted", holds=lambda s: len(s) == 1
        )
    assert [one.step for one in stored_checkpoints(storage_for(root))] == [200]


async def test_what_cannot_be_deleted_is_not_forgotten(
    bus: NatsBus, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> int:
        raise OutOfReachError("the disk went away")

    monkeypatch.setattr(CheckpointStores, "remove", fails)
    async with at_work(bus):
        await publish(bus, root, 100, 200)
        await until_async(
            lambda: places(bus, JOB),
            "both are verified",
            holds=lambda all_: len(all_) == 2 and all(one.is_verified for one in all_),
        )
        done = await change(bus, "delete", 100)
        assert (done.is_refused, done.text) == (True, "the disk went away")
        assert await steps(bus) == [200, 100]
