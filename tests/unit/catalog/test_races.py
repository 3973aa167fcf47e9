"""Files and marks that change between two looks of the catalog."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.bus.requests import RefusalError
from everstep.clock import SystemClock
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointsDocument,
    CheckpointVerified,
    Done,
    Fact,
    KnownCheckpoint,
)
from everstep.messages.codec import decode
from everstep.messages.facts.stamp import FactStamp
from everstep_services.catalog import maintenance, stores
from everstep_services.catalog.domain.facts import apply
from everstep_services.catalog.domain.files import compare
from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.replica import CatalogReplica
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.stores import CheckpointStores
from tests.checkpoint_helpers.checkpoint_shelves import save
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.integration.catalog.replicas import QUICK, at_work, committed
from tests.waiting import until_async
from trainer_sdk.checkpoint.manifest import Identity, Manifest, step_name
from trainer_sdk.checkpoint.storage import checkpoints, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import (
    CheckpointMark,
    StoredCheckpoint,
    stored_checkpoints,
)
from trainer_sdk.checkpoint.storage.folder import Folder

JOB = "llama"
Meanwhile = Callable[[], Awaitable[object]]


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


class World:
    """A catalog whose loops do not run, a bus in memory, real files."""

    def __init__(self, root: str) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.catalog = CatalogReplica(CatalogSettings(), self.bus, SystemClock())
        self.root = root

    async def publish(self, *steps: int) -> None:
        for step in steps:
            await self.save(step)

    async def save(self, step: int, ranks: int = 2) -> None:
        hash_ = await asyncio.to_thread(save, self.root, JOB, step, ranks=ranks)
        await self.commit(step, hash_)

    async def commit(self, step: int, manifest_hash: str) -> None:
        fact = committed(JOB, self.root, step, manifest_hash)
        await self.catalog.indexer.change(JOB, lambda index, now: apply(index, fact, now))

    async def one(self, step: int) -> KnownCheckpoint | None:
        found = (await self.catalog.indexer.read(JOB)).of_step(step, "global")
        return found[0] if found else None

    async def known(self, step: int) -> KnownCheckpoint:
        one = await self.one(step)
        assert one is not None
        return one

    async def delete(self, step: int) -> None:
        one = await self.known(step)
        await self.catalog.indexer.change(JOB, lambda index, _: index.drop(one))
        await asyncio.to_thread(lambda: storage_for(self.root).remove(step_name(step)))

    async def mark(self, step: int, action: str) -> str:
        ask = ChangeCheckpoint(job=JOB, step=step, action=action, by="ann", reason="paper")
        done: Done = await getattr(self.catalog.maintenance.operations, action)(ask)
        return done.text

    def said(self, kind: type[Fact]) -> list[Fact]:
        facts = [decode(one.data) for one in self.server.facts]
        return [fact for fact in facts if isinstance(fact, kind)]


@pytest.fixture
def world(root: str) -> World:
    return World(root)


# ---- reading back


def reading(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Have this done after the manifest was read, and before any shard is."""

    def verify(*arguments: Any) -> Any:
        before()
        return checkpoints.verify(*arguments)

    monkeypatch.setattr(stores, "verify", verify)


async def test_what_is_removed_while_it_is_read_is_missing_and_not_corrupt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publish(100)
    one = await world.known(100)
    reading(monkeypatch, lambda: storage_for(world.root).remove(step_name(100)))
    assert await world.catalog.maintenance.operations.verify(JOB, one) is None
    assert world.said(CheckpointVerified) == world.said(CheckpointQuarantined) == []
    after = await world.known(100)
    assert (after.missing_since is None, after.verified_at) == (False, None)
    assert not await world.catalog.maintenance.operations.verify(
        JOB, one
    )  # nor is it when it is gone before
    assert world.said(CheckpointQuarantined) == []


async def test_what_takes_the_place_of_another_is_not_judged_by_its_reading(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publish(100)
    one = await world.known(100)
    with monkeypatch.context() as patched:
        reading(patched, lambda: save(world.root, JOB, 100, ranks=3, size=64))
        assert await world.catalog.maintenance.operations.verify(JOB, one) is None
    assert world.said(CheckpointVerified) == world.said(CheckpointQuarantined) == []
    other = await world.known(100)
    assert other.manifest_hash != one.manifest_hash
    assert (other.world_size, other.missing_since, other.flaw) == (3, None, "")
    assert await world.catalog.maintenance.operations.verify(JOB, one) is None
    await world.commit(100, other.manifest_hash)
    other = await world.known(100)
    assert await world.catalog.maintenance.operations.verify(JOB, other) == ""
    assert (await world.known(100)).is_good
    save(world.root, JOB, 100, ranks=4)  # no fact was heard of it
    assert await world.catalog.maintenance.operations.verify(JOB, other) is None
    last = await world.known(100)
    assert (last.world_size, last.is_good) == (4, False)


async def test_a_manifest_that_was_not_committed_is_an_error_and_no_quarantine(
    world: World,
) -> None:
    await world.publish(100, 200)
    hash_ = await asyncio.to_thread(save, world.root, JOB, 100, ranks=3)
    said = await world.catalog.maintenance.scan(world.root, JOB)
    wrong = (
        f"the manifest of {world.root}/{step_name(100)} is not the one that was committed: "
        f"its xxh3-128 is {hash_}, and "
    )
    assert said.count("is not the one that was committed") == 1
    assert wrong in said
    for step, is_good in ((100, False), (200, True)):
        flaw = await world.catalog.maintenance.operations.verify(JOB, await world.known(step))
        assert flaw is not None
        assert flaw.startswith("" if is_good else wrong)
        fact = world.said(CheckpointVerified)[-1]
        assert isinstance(fact, CheckpointVerified)
        assert (fact.is_good, fact.reason) == (is_good, flaw)
        one = await world.known(step)
        assert (one.is_good, fact.manifest_hash) == (is_good, one.manifest_hash)
    assert world.said(CheckpointQuarantined) == []
    assert [one.quarantined for one in stored_checkpoints(storage_for(world.root))] == [None, None]


async def test_what_is_forgotten_before_its_verdict_is_written_gets_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publish(100)
    one = await world.known(100)
    real = CheckpointStores.verify

    async def verify(*arguments: Any) -> Any:
        found = await real(*arguments)
        await world.delete(100)
        return found

    monkeypatch.setattr(CheckpointStores, "verify", verify)
    assert await world.catalog.maintenance.operations.verify(JOB, one) is None
    assert world.said(CheckpointVerified) == []


async def test_what_goes_while_it_is_read_keeps_no_other_from_being_read(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(storage: Any, one: Any, pace: Any) -> Any:
        if one.step == 200:
            storage.remove(step_name(200))
        return checkpoints.verify(storage, one, pace)

    monkeypatch.setattr(stores, "verify", verify)
    monkeypatch.setattr(maintenance, "_RETRY_S", 3600.0)
    save(root, JOB, 100)
    save(root, JOB, 200)
    async with at_work(
        MemoryBus(MemoryServer()), replace(QUICK, roots=(root,), scan_every_s=3600.0)
    ) as catalog:
        index = await until_async(
            lambda: catalog.indexer.read(JOB),
            "100 is good",
            holds=lambda index: any(one.is_good for one in index.known.values()),
        )
    found = {one.step: (one.is_good, one.missing_since is not None) for one in index.known.values()}
    assert found == {100: (True, False), 200: (False, True)}


async def test_retention_leaves_alone_what_is_being_read(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    begun, go_on = threading.Event(), threading.Event()

    def slow(storage: Any, one: Any, pace: Any) -> Any:
        if one.step == 200:
            begun.set()
            go_on.wait(60)
        return checkpoints.verify(storage, one, pace)

    async def publish(*steps: int) -> None:
        for step in steps:
            await bus.record(committed(JOB, root, step, save(root, JOB, step)))

    def there() -> list[int]:
        return [one.step for one in stored_checkpoints(storage_for(root))]

    monkeypatch.setattr(stores, "verify", slow)
    try:
        async with at_work(bus, replace(QUICK, keep_last=1)) as catalog:
            indexer = catalog.indexer
            await publish(100)
            await until_async(
                lambda: indexer.read(JOB),
                "100 is good",
                holds=lambda index: any(one.is_good for one in index.known.values()),
            )
            await publish(200)
            await until_async(begun.is_set, "200 is being read")
            await publish(300, 400)
            # The oldest go first: a run that has deleted 300 has passed 200 over.
            await until_async(there, "300 goes", holds=lambda steps: 300 not in steps)
            assert there() == [400, 200, 100]
            go_on.set()
            await until_async(there, "100 goes", holds=lambda steps: 100 not in steps)
            verified = [decode(one.data) for one in server.facts]
    finally:
        go_on.set()
    found = [fact for fact in verified if isinstance(fact, CheckpointVerified)]
    assert [(fact.step, fact.is_good) for fact in found][:2] == [(100, True), (200, True)]


# ---- scanning


@pytest.fixture(params=[0, 1], ids=["after-the-listing", "after-the-second-look"])
def looking(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Meanwhile], None]:
    """Have this done after one of the two looks that a scan takes."""

    def with_(meanwhile: Meanwhile) -> None:
        real, looks = CheckpointStores.scan, iter(range(9))

        async def scan(*arguments: Any) -> Any:
            seen = await real(*arguments)
            if next(looks) == request.param:
                await meanwhile()
            return seen

        monkeypatch.setattr(CheckpointStores, "scan", scan)

    return with_


async def test_what_is_saved_while_files_are_listed_is_not_missing(
    world: World, looking: Callable[[Meanwhile], None]
) -> None:
    await world.publish(100)
    looking(lambda: world.publish(200))
    await world.catalog.maintenance.scan(world.root, JOB)
    assert (await world.known(200)).missing_since is None


async def test_what_is_saved_anew_while_files_are_listed_is_not_missing(
    world: World, looking: Callable[[Meanwhile], None]
) -> None:
    await world.publish(100, 200)
    storage_for(world.root).remove(step_name(200))
    looking(lambda: world.save(200, ranks=3))
    await world.catalog.maintenance.scan(world.root, JOB)
    assert (await world.known(200)).missing_since is None


async def test_what_is_deleted_while_files_are_listed_stays_forgotten(
    world: World, looking: Callable[[Meanwhile], None]
) -> None:
    await world.publish(100, 200)
    looking(lambda: world.delete(200))
    await world.catalog.maintenance.scan(world.root, JOB)
    assert await world.one(200) is None


async def test_what_is_unpinned_while_files_are_listed_stays_unpinned(
    world: World, looking: Callable[[Meanwhile], None]
) -> None:
    await world.publish(100)
    await world.mark(100, "pin")
    looking(lambda: world.mark(100, "unpin"))
    await world.catalog.maintenance.scan(world.root, JOB)
    assert (await world.known(100)).pinned_by == ""


def test_a_mark_on_one_that_is_too_old_to_be_known_is_passed_over() -> None:
    def seen(step: int) -> StoredCheckpoint:
        identity = Identity(job=JOB, round=1, step=step, world_size=1, layout="l")
        manifest = Manifest(identity=identity, files=(), saved_at="")
        mark = None if step else CheckpointMark(reason="NaN")
        return StoredCheckpoint(step, f"/ckpt/{step_name(step)}", manifest, "h", quarantined=mark)

    index = Index(JOB, CheckpointsDocument())
    now = FactStamp(SystemClock().wall(), lambda: "0" * 32, "catalog")
    compare(index, "/ckpt", [seen(step) for step in range(1000, -1, -1)], now)
    assert (len(index.known), index.facts) == (1000, [])


# ---- marking


@pytest.mark.parametrize("action", ["pin", "quarantine"])
async def test_what_is_being_deleted_cannot_be_marked_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    await world.publish(100)
    real = getattr(CheckpointStores, action)

    async def marked(*arguments: Any) -> None:
        await real(*arguments)
        one = await world.known(100)
        await world.catalog.indexer.change(JOB, lambda index, _: index.drop(one))

    monkeypatch.setattr(CheckpointStores, action, marked)
    with pytest.raises(RefusalError, match="knows no checkpoint of step 100"):
        await world.mark(100, action)
    assert world.said(CheckpointPinned) == world.said(CheckpointQuarantined) == []


# ---- what has no folder any more


async def test_a_storage_that_hangs_is_not_asked_again_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.publish(100)
    asked, is_over = [], threading.Event()

    def hang(folder: Folder, inside: str = "") -> list[str]:
        asked.append(folder.path)
        is_over.wait(30)
        return []

    monkeypatch.setattr(Folder, "folders", hang)
    monkeypatch.setattr(stores, "_GLANCE_S", 0.05)
    for _ in range(2):
        index = await world.catalog.maintenance.glance(JOB)
        assert [one.missing_since for one in index.known.values()] == [None]
    is_over.set()
    assert asked == [world.root]
