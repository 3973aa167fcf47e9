"""The catalog is killed while it indexes: who saves or restores goes on, and nothing is lost."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Held
from everstep.bus.server.dev_server import DevServer
from everstep.messages import CheckpointQuarantined, CheckpointVerified
from tests.checkpoint_helpers.checkpoint_shelves import flip
from tests.e2e import lifeline
from tests.integration.catalog.replicas import committed, places
from tests.integration.health.replicas import facts_of
from tests.waiting import WITHIN_S, until_async
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look

JOB = "llama"
SCRIPT = Path(__file__).parents[1] / "scripts" / "dying_catalog.py"
POINTS = range(1, 9)
SAVES = 3
"""For each kill; the first of them is damaged, and no longer what was saved."""


async def started(nats: DevServer, folder: Path, **more: str) -> asyncio.subprocess.Process:
    settings = nats.settings(SERVICE)
    environ = {
        **lifeline.bare_environment(),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(folder / "spool"),
        "EVERSTEP_CATALOG__TEND_EVERY_S": "0.05",
        "EVERSTEP_OBSERVE__PORT": "0",
        **more,
    }
    with (folder / "log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), env=environ, stdout=log, stderr=log
        )


async def free_lease(bus: Bus) -> None:
    """As time does after ten seconds."""
    held = await bus.documents("LEASES").get("catalog")
    await bus.leases.release(Held("catalog", "", 10, held.revision))


def train(root: str, until: int) -> int:
    """Restore, save the next steps; the step from which it went on."""
    state: dict[str, Any] = {"weight": torch.zeros(2000)}
    saves = Checkpointer(root, job=JOB)
    found = saves.restore(state)
    begun_at = 0 if found is None else found.step
    assert torch.equal(state["weight"], torch.full((2000,), float(begun_at)))
    for step in range(begun_at + 1, until + 1):
        state["weight"] += 1
        saves.save(step, state, wait=True)
    saves.close()
    return begun_at


def manifest_hash(root: str, step: int) -> str:
    found = look(storage_for(root), step)
    assert found is not None
    return found.manifest_hash


async def judged(
    bus: NatsBus, verified: int, blamed: int
) -> tuple[list[CheckpointVerified], list[CheckpointQuarantined]]:
    """The facts on record about the checkpoints, once this number is there."""
    return (
        await facts_of(bus, CheckpointVerified, verified),
        await facts_of(bus, CheckpointQuarantined, blamed),
    )


@pytest.mark.timeout(600)  # nine processes are started one after the other
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
async def test_whenever_it_is_killed_it_goes_on_and_nobody_waits_for_it(
    nats: DevServer, tmp_path: Path
) -> None:
    root, damaged = str(tmp_path / "ckpt"), set[int]()
    async with connect(nats.settings(SERVICE), "test", spool=tmp_path / "test") as bus:
        await topology.init(bus.jetstream)
        for point in POINTS:
            last = point * SAVES
            catalog = await started(nats, tmp_path, KILL_AT=str(point))
            assert await asyncio.to_thread(train, root, last) == last - SAVES
            damaged.add(last - SAVES + 1)
            for step in range(last - SAVES + 1, last + 1):
                hash_ = await asyncio.to_thread(manifest_hash, root, step)
                if step in damaged:
                    await asyncio.to_thread(flip, root, step, "__0_0.distcp")
                await bus.record(committed(JOB, root, step, hash_))
            async with asyncio.timeout(WITHIN_S):
                assert await catalog.wait() == -signal.SIGKILL
            await free_lease(bus)
        catalog = await started(nats, tmp_path)
        all_steps = set(range(1, POINTS[-1] * SAVES + 1))
        try:
            found = await until_async(
                lambda: places(bus, JOB),
                "everything is known and read back",
                holds=lambda all_: (
                    {one.step for one in all_ if one.is_verified or one.is_quarantined} == all_steps
                ),
                despite=BusError,
            )
            await judged(bus, len(all_steps), len(damaged))
        finally:
            catalog.terminate()
            await catalog.wait()
        verified, blamed = await judged(bus, len(all_steps), len(damaged))
    notes = {one.step: one.note for one in found if one.is_quarantined}
    assert notes.keys() == damaged, notes
    assert Counter(fact.step for fact in verified) == dict.fromkeys(all_steps, 1)
    assert {fact.step for fact in verified if not fact.is_good} == damaged
    assert Counter(fact.step for fact in blamed) == dict.fromkeys(damaged, 1)
