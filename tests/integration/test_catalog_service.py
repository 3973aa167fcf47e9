"""The catalog on a real bus, with real files: what it knows, repairs, reads back and deletes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.devserver import DevServer
from everstep.bus.errors import AskRefusedError
from everstep.bus.roles import SERVICE
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointDeleted,
    CheckpointQuarantined,
    CheckpointsCollected,
    CheckpointsLocated,
    CheckpointVerified,
    CollectCheckpoints,
    ControlDocument,
    DeletionRefused,
    Done,
    LocateCheckpoint,
    Message,
    NodeLost,
    OperatorActed,
    ReplicaLost,
    ReplicationDegraded,
    ReplicationRestored,
    RequestCopy,
    RequestRelease,
    RoundDocument,
    ScanCheckpoints,
)
from everstep.messages.codec import encode
from everstep.messages.documents import Replication, Seat
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.shelves import OutOfReachError, Shelves
from tests.checkpoint_shelves import flip, leave, save
from tests.integration.catalog_replicas import (
    QUICK,
    about,
    at_work,
    committed,
    formed,
    places,
    stored,
)
from tests.integration.health_replicas import all_facts
from tests.unit.round_documents import round_document
from tests.waiting import until_async
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.shelf import look, shelved

JOB = "llama"


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    """A bus of the test's own: how far facts were read belongs to no job."""
    async with connect(nats.settings(SERVICE), "test", spool=tmp_path / "test") as bus:
        await topology.init(bus.jetstream)
        yield bus


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


async def publish(bus: NatsBus, root: str, *steps: int) -> None:
    """Checkpoints in files, and the facts about them."""
    for step in steps:
        await bus.record(committed(JOB, root, step, save(root, JOB, step)))
    await bus.flush(10)


async def change(bus: NatsBus, action: str, step: int) -> Done:
    ask = ChangeCheckpoint(job=JOB, step=step, action=action, by="ann", reason="why not")
    return await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=10)


async def steps(bus: NatsBus) -> list[int]:
    return [one.step for one in await places(bus, JOB)]


async def seen(bus: NatsBus, kind: type[Message]) -> list[Message]:
    return [fact for fact in await all_facts(bus) if isinstance(fact, kind)]


async def test_what_was_committed_is_listed_read_back_and_located(bus: NatsBus, root: str) -> None:
    async with at_work(bus):
        await publish(bus, root, 100, 200)
        found = await until_async(
            lambda: places(bus, JOB),
            "both are verified",
            holds=lambda all_: len(all_) == 2 and all(one.is_verified for one in all_),
        )
        assert [one.step for one in found] == [200, 100]
        assert found[0].path == f"{root}/step-000000200"
        ask = LocateCheckpoint(job=JOB, round=2, world_size=2)
        there = await bus.ask("catalog", "locate", ask, CheckpointsLocated, job=JOB, within_s=10)
        assert [one.step for one in there.places] == [200, 100]
        assert there.rejected == ()
    verified = await seen(bus, CheckpointVerified)
    assert [fact.step for fact in verified if isinstance(fact, CheckpointVerified)] == [200, 100]


async def test_a_flipped_bit_is_found_and_nobody_is_sent_to_it(bus: NatsBus, root: str) -> None:
    save(root, JOB, 100)
    hash_ = save(root, JOB, 200)
    flip(root, 200)
    async with at_work(bus):
        await publish(bus, root, 100)
        await bus.record(committed(JOB, root, 200, hash_))
        await until_async(
            lambda: places(bus, JOB),
            "200 is quarantined",
            holds=lambda all_: any(one.step == 200 and one.is_quarantined for one in all_),
        )
        ask = LocateCheckpoint(job=JOB, round=2, world_size=2)
        there = await bus.ask("catalog", "locate", ask, CheckpointsLocated, job=JOB, within_s=10)
        assert [one.step for one in there.places] == [100]
        assert [one.step for one in there.rejected] == [200]
        assert "__1_0.distcp is not what was saved" in there.rejected[0].reason
        one = await until_async(
            lambda: look(storage_for(root), 200),
            "the files say so, too",
            holds=lambda found: found.quarantined is not None,
        )
        assert one.quarantined is not None
        assert one.quarantined.cause == "corrupt"
        assert (await change(bus, "delete", 200)).is_refused
    facts = [fact for fact in await all_facts(bus) if isinstance(fact, CheckpointQuarantined)]
    assert [(fact.step, fact.cause) for fact in facts] == [(200, "corrupt")]


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
    assert [one.step for one in shelved(storage_for(root))] == [500, 400, 100]
    gone = [fact for fact in await all_facts(bus) if isinstance(fact, CheckpointDeleted)]
    assert sorted(fact.step for fact in gone) == [200, 300]
    assert all(fact.last_good_step is not None and fact.freed_bytes > 8192 for fact in gone)


async def test_the_brake_holds_retention(bus: NatsBus, root: str) -> None:
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
        assert await catalog.tender.rules(JOB) == (await catalog.tender.rules(JOB))
        ask = CollectCheckpoints(job=JOB, by="ann", reason="room")
        plan = await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=10)
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
        plan = await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=10)
        assert [(one.step, one.is_kept) for one in plan.judged] == [(100, True), (400, False)]
        assert plan.judged[1].path == str(dead)
        assert "what dead saves left goes, too: 1 with 4 bytes; nothing was deleted" in plan.text
        assert dead.exists()
        ask = msgspec.structs.replace(ask, is_dry_run=False)
        await bus.ask("catalog", "collect", ask, CheckpointsCollected, job=JOB, within_s=10)
        swept = lambda: catalog.tender.statistics()["swept_total"]  # noqa: E731
        await until_async(swept, "what is dead goes", holds=lambda count: count == 1)
    assert not dead.exists()
    assert of_the_round.exists()
    assert young.exists()

    again = leave(root, ".saving/400-r1-0a1b2c3d-7", hours_ago=25)
    async with at_work(bus, msgspec.structs.replace(QUICK, keep_last=1, scan_every_s=0.1)):
        await until_async(lambda: not again.exists(), "retention takes it, too", holds=bool)
    assert of_the_round.exists()
    assert young.exists()


async def test_nobody_deletes_the_last_good_one(bus: NatsBus, root: str) -> None:
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
    assert [one.step for one in shelved(storage_for(root))] == [100]
    refused = [fact for fact in await all_facts(bus) if isinstance(fact, DeletionRefused)]
    assert [(fact.step, fact.by) for fact in refused] == [(100, "ann")]


async def test_people_change_checkpoints_and_it_is_on_record(bus: NatsBus, root: str) -> None:
    async with at_work(bus, msgspec.structs.replace(QUICK, verify=False)):
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
        for action, shown in (
            ("pin", {"is_pinned": True}),
            ("unpin", {"is_pinned": False}),
            ("quarantine", {"is_quarantined": True}),
            ("release", {"is_quarantined": False}),
        ):
            assert not (await change(bus, action, 100)).is_refused
            (one,) = await places(bus, JOB)
            assert {name: getattr(one, name) for name in shown} == shown
            seen_ = look(storage_for(root), 100)
            assert seen_ is not None
            assert bool(seen_.pinned) is one.is_pinned
            assert bool(seen_.quarantined) is one.is_quarantined
        assert not (await change(bus, "verify", 100)).is_refused
        await until_async(
            lambda: places(bus, JOB), "it is verified", holds=lambda all_: all_[0].is_verified
        )
        with pytest.raises(AskRefusedError, match="knows no checkpoint of step 7"):
            await change(bus, "pin", 7)
        with pytest.raises(AskRefusedError, match="cannot be done to a checkpoint"):
            await change(bus, "eat", 100)
    acted = [fact for fact in await all_facts(bus) if isinstance(fact, OperatorActed)]
    assert [(fact.action, fact.outcome) for fact in acted] == [
        ("pin_checkpoint", "accepted"),
        ("unpin_checkpoint", "accepted"),
        ("quarantine_checkpoint", "accepted"),
        ("release_checkpoint", "accepted"),
        ("verify_checkpoint", "accepted"),
        ("pin_checkpoint", "refused"),
        ("eat_checkpoint", "refused"),
    ]


async def test_an_index_that_was_lost_is_made_again_from_the_files(bus: NatsBus, root: str) -> None:
    for step in (100, 200):
        save(root, JOB, step)
    flip(root, 200, "manifest.json", 1)
    async with at_work(bus, msgspec.structs.replace(QUICK, roots=(root,))):
        found = await until_async(
            lambda: places(bus, JOB), "both are known", holds=lambda all_: len(all_) == 2
        )
        assert [(one.step, one.is_quarantined) for one in found] == [(200, True), (100, False)]
        assert found[1].world_size == 2
        storage_for(root).remove("step-000000100")
        ask = ScanCheckpoints(job=JOB, by="ann", reason="somebody cleaned up")
        done = await bus.ask("catalog", "scan", ask, Done, job=JOB, within_s=10)
        assert "1 gone" in done.text
        assert [one.is_missing for one in await places(bus, JOB)] == [False, True]


async def test_a_root_that_is_out_of_reach_makes_nothing_missing(
    bus: NatsBus, root: str, tmp_path: Path
) -> None:
    async with at_work(bus):
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
        await asyncio.to_thread(Path(root).rename, tmp_path / "unmounted")
        ask = ScanCheckpoints(job=JOB, by="ann", reason="look")
        done = await bus.ask("catalog", "scan", ask, Done, job=JOB, within_s=10)
        assert done.is_refused
        assert "cannot be seen from here" in done.text
        assert [one.is_missing for one in await places(bus, JOB)] == [False]


async def test_another_replica_goes_on_where_the_first_one_stopped(bus: NatsBus, root: str) -> None:
    async with at_work(bus):
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
    await publish(bus, root, 200)
    async with at_work(bus):
        await until_async(lambda: steps(bus), "both are", holds=lambda found: found == [200, 100])


async def test_whoever_dies_while_it_deletes_leaves_files_that_the_next_one_finds(
    bus: NatsBus, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    settings = msgspec.structs.replace(QUICK, keep_last=1)
    with monkeypatch.context() as patched:
        patched.setattr(Shelves, "remove", hangs)
        async with at_work(bus, settings):
            await publish(bus, root, 100, 200)
            await until_async(lambda: steps(bus), "100 is forgotten", holds=lambda s: s == [200])
    assert [one.step for one in shelved(storage_for(root))] == [200, 100]
    async with at_work(bus, settings):
        await until_async(
            lambda: seen(bus, CheckpointDeleted), "100 is deleted", holds=lambda s: len(s) == 1
        )
    assert [one.step for one in shelved(storage_for(root))] == [200]


async def test_what_cannot_be_deleted_is_not_forgotten(
    bus: NatsBus, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> int:
        raise OutOfReachError("the disk went away")

    monkeypatch.setattr(Shelves, "remove", fails)
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


class Rendezvous:
    """Stands for rendezvous: shows a round of four nodes, and hears who is to copy what."""

    def __init__(self) -> None:
        self.asked: list[RequestCopy] = []
        self.gone = ""

    async def show(self, _: Message) -> RoundDocument:
        seats = tuple(
            Seat(
                node=f"n{n}",
                slot=n,
                ranks=1,
                address=f"10.0.0.{n}",
                stage="gone" if f"n{n}" == self.gone else "running",
                failure_domain=f"rack-{n % 2}",
                replica_port=7000 + n,
            )
            for n in range(4)
        )
        how = Replication(key="secret", factor=2)
        return msgspec.structs.replace(
            round_document(JOB, seats=4, name_characters=20),
            round=1,
            seats=seats,
            replication=how,
        )

    async def copy(self, question: Message) -> Done:
        assert isinstance(question, RequestCopy)
        self.asked.append(question)
        return Done(text="asked")


async def test_images_are_released_by_the_agents_that_have_them(bus: NatsBus) -> None:
    asked: list[Message] = []

    async def release(question: Message) -> Done:
        asked.append(question)
        is_first = len(asked) == 1
        return Done(text="all nodes are asked" if is_first else "over", is_refused=not is_first)

    ask = ChangeCheckpoint(
        job=JOB, step=20, action="release", tier="memory", by="ann", reason="the data was bad"
    )
    async with at_work(bus), bus.answer("rendezvous", {"release": release}):
        done = await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=10)
        assert done.text.startswith("all nodes are asked for states of step 20")
        done = await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=10)
        assert (done.is_refused, done.text) == (True, "over")
    one = asked[0]
    assert isinstance(one, RequestRelease)
    assert (one.step, one.by, one.reason) == (20, "ann", "the data was bad")
    acted = [fact for fact in await all_facts(bus) if isinstance(fact, OperatorActed)]
    assert [(fact.action, fact.target, fact.outcome) for fact in acted] == [
        ("release_checkpoint", "step 20 (memory)", "accepted"),
        ("release_checkpoint", "step 20 (memory)", "refused"),
    ]


async def test_too_few_copies_are_said_repaired_and_said_to_be_over(bus: NatsBus) -> None:
    rendezvous = Rendezvous()
    await bus.record(formed(JOB, 4))
    for slot in range(4):
        await bus.record(stored(JOB, slot, f"n{slot ^ 1}"))
    await bus.flush(10)  # all at once: half of it would be too few copies, too
    async with (
        bus.answer("rendezvous", {"show": rendezvous.show, "copy": rendezvous.copy}),
        at_work(bus),
    ):
        (place,) = await until_async(
            lambda: places(bus, JOB), "all are held", holds=lambda all_: len(all_) == 1
        )
        assert (place.tier, place.step, place.survivable_losses) == ("peer", 100, 1)
        assert [one.node for one in place.replicas[2].holders] == ["n2", "n3"]
        assert place.replicas[2].holders[0].port == 7002

        rendezvous.gone = "n3"
        lost = NodeLost(**about(JOB), node="n3", silence_s=3.2, limit_s=3, reason="silent")
        await bus.record(lost)
        await until_async(
            lambda: rendezvous.asked, "copies are asked for", holds=lambda asked: len(asked) == 2
        )
        asked = [(one.owner_slot, one.step, one.holder) for one in rendezvous.asked]
        assert asked == [(2, 100, "n2"), (3, 100, "n2")]
        for one in rendezvous.asked:
            assert one.to == "n1"  # in another rack than n2, and n3 is lost
            await bus.record(stored(JOB, one.owner_slot, one.to))
        await until_async(
            lambda: seen(bus, ReplicationRestored), "enough may be lost again", holds=bool
        )
    degraded = [fact for fact in await all_facts(bus) if isinstance(fact, ReplicationDegraded)]
    assert degraded[0].slots == (2, 3)
    assert (degraded[0].wanted_losses, degraded[0].survivable_losses) == (1, 0)
    gone = [fact for fact in await all_facts(bus) if isinstance(fact, ReplicaLost)]
    assert sorted((fact.owner_slot, fact.holder) for fact in gone) == [(2, "n3"), (3, "n3")]


def test_the_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        CatalogSettings(keep_last=-1)
