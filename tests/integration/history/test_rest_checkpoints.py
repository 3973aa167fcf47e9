"""REST answers: which checkpoints there are, and has done what people want with them."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from everstep_services.catalog.replica import CatalogReplica
from tests.checkpoint_helpers.checkpoint_shelves import flip, save
from tests.integration.catalog.replicas import at_work, committed
from tests.integration.conftest import Api
from tests.unit.history.facts import make
from tests.waiting import until_async
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints

JOB = "llama"


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: how a database answers makes no difference here."""
    return sqlite_url


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "ckpt")


@pytest.fixture
async def operator(api: Api, root: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Three checkpoints; 300 differs from what was saved."""
    facts = [committed(JOB, root, step, save(root, JOB, step)) for step in (100, 200, 300)]
    flip(root, 300)
    await api.add(make("job_started", job=JOB, round=None), *facts)
    for fact in facts:
        await api.bus.record(fact)
    async with api.client(await api.token("operate")) as client:
        yield client


@pytest.fixture
async def catalog(api: Api, operator: httpx2.AsyncClient) -> AsyncIterator[CatalogReplica]:
    async with at_work(api.bus) as working:
        await until_async(
            lambda: states(operator),
            "all are read back",
            holds=lambda found: found == {300: "quarantined", 200: "verified", 100: "verified"},
        )
        yield working


async def states(client: httpx2.AsyncClient) -> dict[int, str]:
    items = (await client.get(f"jobs/{JOB}/checkpoints")).json()["items"]
    return {
        one["step"]: "quarantined"
        if one["is_quarantined"]
        else "verified"
        if one["is_verified"]
        else "committed"
        for one in items
    }


async def test_a_jobs_checkpoints_are_listed_the_newest_first(
    operator: httpx2.AsyncClient, catalog: CatalogReplica, root: str
) -> None:
    found = (await operator.get(f"jobs/{JOB}/checkpoints", params={"limit": 2})).json()
    assert (found["job"], found["is_live"], found["note"]) == (JOB, True, None)
    assert [one["step"] for one in found["items"]] == [300, 200]
    assert "__1_0.distcp differs from what was saved" in found["items"][0]["note"]
    one = (await operator.get(f"jobs/{JOB}/checkpoints/200")).json()
    assert one["path"] == f"{root}/step-000000200"
    assert (one["world_size"], one["shards"], one["is_verified"]) == (2, 3, True)
    (there,) = [each for each in stored_checkpoints(storage_for(root)) if each.step == 200]
    assert one["manifest_hash"] == one["committed_hash"] == there.manifest_hash
    assert (await operator.get(f"jobs/{JOB}/checkpoints/7")).status_code == 404
    assert (await operator.get("jobs/nobody/checkpoints")).status_code == 404


async def test_what_would_be_restored_is_told_with_what_is_passed_over(
    operator: httpx2.AsyncClient, catalog: CatalogReplica
) -> None:
    found = (await operator.get(f"jobs/{JOB}/checkpoints:locate")).json()
    assert [one["step"] for one in found["places"]] == [200, 100]
    assert [one["step"] for one in found["rejected"]] == [300]
    asked = await operator.get(f"jobs/{JOB}/checkpoints:locate", params={"step": 100})
    assert [one["step"] for one in asked.json()["places"]] == [100]


async def test_people_pin_and_release_by_name(
    operator: httpx2.AsyncClient, catalog: CatalogReplica
) -> None:
    wanted = {"reason": "for the paper", "user": "ann@login-1"}
    answer = await operator.post(f"jobs/{JOB}/checkpoints/100:pin", json=wanted)
    assert answer.status_code == 202
    assert (answer.json()["action"], answer.json()["by"]) == ("pin", "ann@login-1 (a operate)")
    one = (await operator.get(f"jobs/{JOB}/checkpoints/100")).json()
    assert one["is_pinned"]
    assert "pinned by ann@login-1 (a operate): for the paper" in one["note"]
    released = await operator.post(f"jobs/{JOB}/checkpoints/300:release", json={})
    assert released.status_code == 202
    assert not (await operator.get(f"jobs/{JOB}/checkpoints/300")).json()["is_quarantined"]


async def test_what_may_not_be_done_is_refused_with_the_reason(
    operator: httpx2.AsyncClient, catalog: CatalogReplica, root: str
) -> None:
    kept = await operator.post(f"jobs/{JOB}/checkpoints/200:delete", json={})
    assert (kept.status_code, kept.json()["code"]) == (409, "refused")
    assert "it is the last good one" in kept.json()["detail"]
    unknown = await operator.post(f"jobs/{JOB}/checkpoints/7:pin", json={})
    assert unknown.status_code == 409
    assert "knows no checkpoint of step 7" in unknown.json()["detail"]
    assert (await operator.post(f"jobs/{JOB}/checkpoints/7:eat", json={})).status_code == 422
    assert [one.step for one in stored_checkpoints(storage_for(root))] == [300, 200, 100]


async def test_a_clean_up_says_first_what_would_go(
    operator: httpx2.AsyncClient, catalog: CatalogReplica, root: str
) -> None:
    wanted: dict[str, object] = {"keep_last": 1}
    plan = (await operator.post(f"jobs/{JOB}/checkpoints:collect", json=wanted)).json()
    assert {one["step"]: one["is_kept"] for one in plan["judged"]} == {
        300: True,
        200: True,
        100: False,
    }
    assert "nothing was deleted" in plan["text"]
    wanted["is_dry_run"] = False
    assert (await operator.post(f"jobs/{JOB}/checkpoints:collect", json=wanted)).status_code == 202
    await until_async(
        lambda: [one.step for one in stored_checkpoints(storage_for(root))],
        "100 is gone",
        holds=lambda steps: steps == [300, 200],
    )


async def test_without_a_catalog_there_is_what_is_on_record(
    api: Api, operator: httpx2.AsyncClient, root: str
) -> None:
    path = f"{root}/step-000000100"
    gone = make("checkpoint_deleted", job=JOB, step=100, path=path, tier="global", round=None)
    await api.add(gone)
    found = (await operator.get(f"jobs/{JOB}/checkpoints")).json()
    assert not found["is_live"]
    assert "catalog" in found["note"]
    assert [one["step"] for one in found["items"]] == [300, 200]
    hashes = [one.manifest_hash for one in stored_checkpoints(storage_for(root))]
    assert [one["committed_hash"] for one in found["items"]] == hashes[:2]
    located = await operator.get(f"jobs/{JOB}/checkpoints:locate")
    assert (located.status_code, located.json()["code"]) == (503, "catalog_unavailable")
    pinned = await operator.post(f"jobs/{JOB}/checkpoints/100:pin", json={})
    assert pinned.status_code == 503


async def test_readers_may_look_and_not_touch(api: Api, operator: httpx2.AsyncClient) -> None:
    async with api.client(await api.token("read")) as reader:
        assert (await reader.get(f"jobs/{JOB}/checkpoints")).status_code == 200
        assert (await reader.post(f"jobs/{JOB}/checkpoints/100:pin", json={})).status_code == 403
        assert (await reader.post(f"jobs/{JOB}/checkpoints:collect", json={})).status_code == 403


async def test_how_saving_goes_is_told_from_the_record(
    api: Api, operator: httpx2.AsyncClient, root: str
) -> None:
    """REST has the lag and the number of waiting saves of each node (A8.5)."""
    facts = [
        ("checkpoint_failed", {"step": 400, "tier": "global", "stage": "write", "node": "n1",
                               "reason": "the disk is full"}),
        ("interval_chosen", {"tier": "global", "every_steps": 50, "every_s": 60.0, "reason": "r"}),
        ("saves_delayed", {"node": "n2", "lag_s": 0.0, "waiting": 0, "reason": "it is over"}),
        ("saves_delayed", {"node": "n1", "lag_s": 610.0, "waiting": 2, "reason": "a slow disk"}),
        ("save_refused", {"node": "n1", "step": 410, "reason": "/dev/shm is too small"}),
        ("checkpoint_restored", {"step": 300, "tiers": (), "reason": "it is the newest"}),
        ("replication_degraded", {"wanted_losses": 1, "survivable_losses": 0, "reason": "slot 3"}),
    ]  # fmt: skip
    await api.add(*(make(kind, job=JOB, round=2, **more) for kind, more in facts))
    found = (await operator.get(f"jobs/{JOB}/saves")).json()
    (tier,) = found["tiers"]
    assert (tier["tier"], tier["committed_step"], tier["commits"]) == ("global", 300, 3)
    assert tier["manifest_hash"] == stored_checkpoints(storage_for(root))[0].manifest_hash
    assert (tier["failed_step"], tier["failed_reason"]) == (400, "the disk is full")
    assert (tier["failures"], tier["every_steps"]) == (1, 50)
    waiting = [(one["node"], one["waiting"], one["delay_lag_s"]) for one in found["delays"]]
    assert waiting == [("n1", 2, 610.0), ("n2", 0, 0.0)]
    assert found["delays"][0]["refusal_reason"] == "/dev/shm is too small"
    restore = found["restore"]
    assert (restore["outcome"], restore["restored_step"]) == ("restored", 300)
    assert (restore["survivable_losses"], restore["is_degraded"]) == (0, True)

    await api.add(
        make("restore_failed", job=JOB, round=3, reason="all are torn"),
        make("replication_restored", job=JOB, round=3, survivable_losses=1, degraded_s=60.0),
    )
    restore = (await operator.get(f"jobs/{JOB}/saves")).json()["restore"]
    assert (restore["outcome"], restore["restored_step"]) == ("failed", None)
    assert (restore["restores"], restore["failed_restores"]) == (1, 1)
    assert (restore["survivable_losses"], restore["is_degraded"]) == (1, False)
    assert (await operator.get("jobs/nobody/saves")).status_code == 404
