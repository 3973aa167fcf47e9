"""A root that hangs, or holds what is no file, delays the checkpoints of no other job (B3)."""

import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import CheckpointVerified
from everstep_services.catalog import maintenance
from tests.checkpoint_helpers.checkpoint_shelves import save
from tests.checkpoint_helpers.hung_mount import hung
from tests.integration.catalog.job import opened_bus, seen
from tests.integration.catalog.replicas import QUICK, at_work, committed
from tests.waiting import until_async
from trainer_sdk.checkpoint.storage.folder import Folder

JOBS = ("a-hung", "b-fifo", "c-hung-too", "good")


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with opened_bus(nats, tmp_path) as bus:
        yield bus


async def verified(bus: NatsBus) -> set[str]:
    return {fact.job for fact in await seen(bus, CheckpointVerified) if fact.is_good}


@pytest.mark.parametrize("in_settings", [False, True])
async def test_hung_roots_delay_no_other_job(
    bus: NatsBus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_settings: bool,
) -> None:
    caplog.set_level(logging.INFO)
    answers, roots = threading.Event(), {job: str(tmp_path / job) for job in JOBS}
    read = Folder.read

    def hanging(folder: Folder, name: str, *where: int) -> bytes:
        if "hung" in Path(folder.path).name:
            answers.wait()
        return read(folder, name, *where)

    for job, root in roots.items():
        hash_ = save(root, job, 100)
        await bus.record(committed(job, root, 100, hash_))
    os.unlink(f"{roots['b-fifo']}/owner.json")
    os.mkfifo(f"{roots['b-fifo']}/owner.json")
    await bus.flush(30)
    monkeypatch.setattr(Folder, "read", hanging)
    settings = QUICK
    if in_settings:
        settings = QUICK.__class__(tend_every_s=0.05, roots=tuple(sorted(roots.values())))
    try:
        async with at_work(bus, settings) as catalog:
            await until_async(
                lambda: verified(bus), "the good one is verified", holds=lambda jobs: "good" in jobs
            )
            assert catalog.statistics()["storage_threads"] <= 2 * 16
            answers.set()
            await until_async(
                lambda: verified(bus),
                "those that hung are verified, too",
                holds=lambda jobs: {"a-hung", "c-hung-too"} <= jobs,
            )
            assert "b-fifo" not in await verified(bus)
    finally:
        answers.set()
    assert any("a FIFO, not a regular file" in line for line in caplog.messages), caplog.messages


async def test_a_mount_that_hangs_delays_no_other_job(
    bus: NatsBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, for which threads wait in the kernel, as for an NFS without its server."""
    monkeypatch.setattr(maintenance, "_RETRY_S", 0.05)  # after the error of an unmount
    roots = {job: tmp_path / job for job in ("a-hung", "good")}
    for job, root in roots.items():
        hash_ = save(str(root), job, 100)
        await bus.record(committed(job, str(root), 100, hash_))
    await bus.flush(30)
    with hung(roots["a-hung"]) as answers:
        async with at_work(bus, QUICK) as catalog:
            await until_async(
                lambda: verified(bus), "the good one is verified", holds=lambda jobs: "good" in jobs
            )
            assert 1 <= catalog.statistics()["storage_threads"] <= 16
            answers()
            await until_async(
                lambda: verified(bus),
                "the other is verified, too",
                holds=lambda jobs: len(jobs) == 2,
            )
