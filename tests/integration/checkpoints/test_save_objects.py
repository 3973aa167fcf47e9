"""Saves into an object store: real servers of S3 and Azure, each writer a client of its own."""

import io
import pickle
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from tests.checkpoint_helpers.saved_by import WITHIN_S, saving
from tests.contract.azure_server import CONTAINER, PROGRAM, WHY_NOT, azure_server
from tests.contract.s3_server import BUCKET, s3_server
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from tests.waiting import until
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import MANIFEST, METADATA, Manifest, decode, step_name
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import Storage, storage_for


@pytest.fixture(params=["s3", "az"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "az" and PROGRAM is None:
        pytest.skip(WHY_NOT)
    bucket, server = (CONTAINER, azure_server) if request.param == "az" else (BUCKET, s3_server)
    with server(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield f"{request.param}://{bucket}/{uuid.uuid4().hex}"


def manifest_in(storage: Storage, step: int) -> Manifest:
    return decode(storage.read(f"{step_name(step)}/{MANIFEST}"), Manifest, storage.url)


def test_two_ranks_save_and_what_is_visible_stays(url: str, tmp_path: Path) -> None:
    def one(group: RankGroup) -> list[int]:
        with saving(tmp_path, group, root=url) as rank:
            shared = {"w": torch.arange(5000.0), "value": {"lr": 0.1}}
            rank.save(3, shared | {f"own{group.rank}": torch.full((7,), group.rank)})
            return rank.finish()

    assert together(2, one) == [[1], [1]]
    storage = storage_for(url)
    manifest = manifest_in(storage, 3)
    octets = {}
    for file in manifest.files:
        octets[file.name] = storage.read(f"{step_name(3)}/{file.name}")
        assert xxhash.xxh3_128_hexdigest(octets[file.name]) == file.hash
    (named,) = [name for name in octets if name.endswith(METADATA)]
    folder = named.removesuffix(METADATA)
    metadata = pickle.loads(octets[named])
    for index, at in metadata.storage_data.items():
        whole = octets[folder + at.relative_path]
        found = torch.load(io.BytesIO(whole[at.offset : at.offset + at.length]), weights_only=True)
        if index.fqn == "w":
            assert torch.equal(found, torch.arange(5000.0))
    assert len(metadata.storage_data) == 4

    fenced = JobContext("vit-l", 0, str(tmp_path / "old"), has_keeper=True)
    with saving(tmp_path, root=url, context=fenced) as stale:
        stale.save(3, {"w": torch.zeros(3)})
        assert stale.finish() == [1]
        assert "round 1 has saved step 3 there" in stale.told.warned[0]
    assert manifest_in(storage, 3) == manifest
    for file in manifest.files:
        assert storage.read(f"{step_name(3)}/{file.name}") == octets[file.name]


def test_a_store_that_is_away_is_told_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with saving(tmp_path, root="s3://bucket/prefix") as rank:
        rank.save(1, {"a": torch.ones(3)})
        assert rank.finish() == []
        assert "s3://bucket/prefix/owner.json" in rank.told.warned[0]
        assert "its endpoint" in rank.told.warned[0]
        assert msgspec.json.encode(rank.events("failed"))


def test_an_image_is_kept_before_its_state_is_sent(url: str, tmp_path: Path) -> None:
    with saving(tmp_path, root=url, write_bytes_per_s=1, keeps=True, buffers=2) as rank:
        rank.save(1, {"a": torch.arange(10 << 20, dtype=torch.int32)})
        until(lambda: rank.events("image"), "it is kept", within_s=WITHIN_S)
        assert not rank.events("part_written")
        assert rank.finish() == [1]


def test_it_is_written_no_faster_than_it_may(url: str, tmp_path: Path) -> None:
    with saving(tmp_path, root=url, write_bytes_per_s=64 << 20) as rank:
        began = time.monotonic()
        rank.save(1, {"a": torch.arange(10 << 20, dtype=torch.int32)})
        until(rank.queue.maybe_finalize, "it is durable", within_s=WITHIN_S)
        assert time.monotonic() - began >= 0.5, "its last chunk begins after 32 MiB"
