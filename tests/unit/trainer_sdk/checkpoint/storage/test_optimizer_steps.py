"""A step count that an earlier release has lost is doubted; counts that may differ are not."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.hashing import hash_of
from tests.unit.trainer_sdk.checkpoint.saved_states import JOB
from trainer_sdk.checkpoint.manifest import METADATA, Identity, Manifest, ShardFile, encode
from trainer_sdk.checkpoint.restore.values import as_bytes
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look, verify
from trainer_sdk.checkpoint.torch_format import around

NAMES = {"numbered": "optimizer.state.{}", "named": "optimizer.state.layers.{}.weight"}


def saved(folder: Path, name: str, steps: dict[int, Any], rowless: set[int]) -> str:
    """What `verify` doubts of a checkpoint with these steps of parameters."""
    kinds: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    data = io.BytesIO()
    for number, step in steps.items():
        key = name.format(number)
        kinds[f"{key}.mean"] = TensorStorageMetadata(
            TensorProperties(),
            torch.Size((1, 2)),
            [
                ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((rows, 2)))
                for at, rows in ((0, 1), (1, 0))[: 1 + (number in rowless)]
            ],
        )
        index, octets = MetadataIndex(f"{key}.step"), as_bytes(step, key)
        kinds[index.fqn] = BytesStorageMetadata()
        if isinstance(step, torch.Tensor):
            head, tail = around(step.dtype, ())
            octets = head + step.reshape(1).view(torch.uint8).numpy().tobytes() + tail + bytes(40)
            chunk = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
            kinds[index.fqn] = TensorStorageMetadata(
                TensorProperties(step.dtype), torch.Size(()), [chunk]
            )
            index = MetadataIndex(index.fqn, torch.Size(()))
        places[index] = _StorageInfo("__0_0.distcp", data.tell(), len(octets))
        data.write(octets)
    described = pickle.dumps(Metadata(kinds, storage_data=places))
    files = {"__0_0.distcp": data.getvalue(), METADATA: described}
    place = folder / "step-000000006"
    place.mkdir()
    for file, content in files.items():
        (place / file).write_bytes(content)
    manifest = Manifest(
        identity=Identity(job=JOB, round=1, step=6, world_size=4, layout=""),
        files=tuple(
            ShardFile(name=file, size_bytes=len(content), hash=hash_of(content))
            for file, content in files.items()
        ),
        saved_at="",
    )
    (place / "manifest.json").write_bytes(encode(manifest))
    storage = storage_for(str(folder))
    checkpoint = look(storage, 6)
    assert checkpoint is not None
    verdict = verify(storage, checkpoint)
    assert verdict.is_good, verdict.flaw
    return verdict.doubt


@pytest.mark.parametrize(
    "as_step", [torch.tensor, float, int, lambda one: torch.tensor(one).double()]
)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_lost_step_count_is_doubted(tmp_path: Path, name: str, as_step: Any) -> None:
    steps = {number: as_step(step) for number, step in enumerate((12.0, 8.0, 12.0))}
    doubt = saved(tmp_path, name, steps, {1})
    assert f"{name.format(1)}.step is 8, and other parameters have 12" in doubt


@pytest.mark.parametrize(
    ("steps", "rowless"), [((12, 8, 12), set()), ((12, 12), {1}), ((8, 12), {1}), ((1, 1), {0, 1})]
)
def test_other_step_counts_are_not(tmp_path: Path, steps: Any, rowless: set[int]) -> None:
    counts = {number: torch.tensor(float(step)) for number, step in enumerate(steps)}
    assert saved(tmp_path, NAMES["numbered"], counts, rowless) == ""
