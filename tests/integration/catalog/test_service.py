"""The catalog on a real bus, with real files: what it knows, reads back and finds again."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    CheckpointQuarantined,
    CheckpointsLocated,
    CheckpointVerified,
    Done,
    LocateCheckpoint,
    NumericsSuspected,
    OperatorActed,
    ScanCheckpoints,
)
from everstep_services.catalog.settings import CatalogSettings
from tests.checkpoint_helpers.checkpoint_shelves import flip, save
from tests.integration.catalog.job import JOB, change, opened_bus, publish, steps
from tests.integration.catalog.replicas import (
    QUICK,
    at_work,
    committed,
    places,
)
from tests.integration.health.replicas import facts_of
from tests.waiting import until_async
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with opened_bus(nats, tmp_path) as bus:
        yield bus


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


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
        there = await bus.ask("catalog", "locate", ask, CheckpointsLocated, job=JOB, within_s=30)
        assert [one.step for one in there.places] == [200, 100]
        assert there.rejected == ()
        verified = await facts_of(bus, CheckpointVerified, 2)
    assert sorted(fact.step for fact in verified) == [100, 200]


async def test_a_flipped_bit_is_found_and_nobody_is_sent_to_it(bus: NatsBus, root: str) -> None:
    """The catalog sends restores to the older checkpoint, and records why (A8.8)."""
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
        there = await bus.ask("catalog", "locate", ask, CheckpointsLocated, job=JOB, within_s=30)
        assert [one.step for one in there.places] == [100]
        assert [one.step for one in there.rejected] == [200]
        assert "__1_0.distcp differs from what was saved" in there.rejected[0].reason
        one = await until_async(
            lambda: look(storage_for(root), 200),
            "the files show it, too",
            holds=lambda found: found.quarantined is not None,
        )
        assert one.quarantined is not None
        assert one.quarantined.cause == "corrupt"
        assert (await change(bus, "delete", 200)).is_refused
        facts = await facts_of(bus, CheckpointQuarantined)
    assert [(fact.step, fact.cause) for fact in facts] == [(200, "corrupt")]


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
        with pytest.raises(AskRefusedError, match="is not an operation on a checkpoint"):
            await change(bus, "eat", 100)
        acted = await facts_of(bus, OperatorActed, 7)
    assert [(fact.action, fact.outcome) for fact in acted] == [
        ("pin_checkpoint", "accepted"),
        ("unpin_checkpoint", "accepted"),
        ("quarantine_checkpoint", "accepted"),
        ("release_checkpoint", "accepted"),
        ("verify_checkpoint", "accepted"),
        ("pin_checkpoint", "refused"),
        ("eat_checkpoint", "refused"),
    ]


async def test_a_checkpoint_is_suspect_until_its_result_is_judged_or_a_person_trusts_it(
    bus: NatsBus, root: str
) -> None:
    suspected = NumericsSuspected(
        id="a" * 32, job=JOB, at=datetime.now(UTC), source="agent/n0", round=1, case="c" * 16,
        step=90, signal="nan", moved_at=90,
    )  # fmt: skip
    async with at_work(bus, msgspec.structs.replace(QUICK, verify=False)):
        await bus.record(suspected)
        await publish(bus, root, 80, 100)
        found = await until_async(
            lambda: places(bus, JOB), "both are there", holds=lambda all_: len(all_) == 2
        )
        assert [(it.step, it.is_suspect) for it in found] == [(100, True), (80, False)]
        assert "suspect: at step 90 the loss or the gradient norm is not a number" in found[0].note
        assert (await change(bus, "release", 80)).is_refused
        assert not (await change(bus, "release", 100)).is_refused
        assert not (await places(bus, JOB))[0].is_suspect


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
        done = await bus.ask("catalog", "scan", ask, Done, job=JOB, within_s=30)
        assert "1 gone" in done.text
        assert [one.is_missing for one in await places(bus, JOB)] == [False, True]


async def test_what_somebody_has_removed_is_missing_to_whoever_asks(
    bus: NatsBus, root: str, tmp_path: Path
) -> None:
    async with at_work(bus) as catalog:
        await publish(bus, root, 100, 200)
        await until_async(lambda: steps(bus), "they are known", holds=lambda all_: len(all_) == 2)
        await until_async(
            catalog.statistics, "the first scan", holds=lambda all_: all_["scans_total"] == 1
        )
        there, aside = Path(root, "step-000000200"), tmp_path / "aside"
        await asyncio.to_thread(there.rename, aside)
        assert [one.is_missing for one in await places(bus, JOB)] == [True, False]
        await until_async(
            catalog.statistics, "the index shows it, too", holds=lambda all_: all_["missing"] == 1
        )
        await asyncio.to_thread(aside.rename, there)
        await until_async(
            lambda: places(bus, JOB),
            "it is there again",
            holds=lambda all_: not any(one.is_missing for one in all_),
        )
        assert catalog.statistics()["scans_total"] == 1


async def test_a_root_that_is_out_of_reach_makes_nothing_missing(
    bus: NatsBus, root: str, tmp_path: Path
) -> None:
    """A place that is unmounted has lost nothing (A15.2)."""
    async with at_work(bus):
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
        await asyncio.to_thread(Path(root).rename, tmp_path / "unmounted")
        ask = ScanCheckpoints(job=JOB, by="ann", reason="look")
        done = await bus.ask("catalog", "scan", ask, Done, job=JOB, within_s=30)
        assert done.is_refused
        assert "the catalog cannot see" in done.text
        assert [one.is_missing for one in await places(bus, JOB)] == [False]


async def test_another_replica_goes_on_where_the_first_one_stopped(bus: NatsBus, root: str) -> None:
    async with at_work(bus):
        await publish(bus, root, 100)
        await until_async(lambda: steps(bus), "it is known", holds=lambda found: found == [100])
    await publish(bus, root, 200)
    async with at_work(bus):
        await until_async(lambda: steps(bus), "both are", holds=lambda found: found == [200, 100])


def test_the_settings_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        CatalogSettings(keep_last=-1)
