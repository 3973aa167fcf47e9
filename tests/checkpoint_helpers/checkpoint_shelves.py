"""Checkpoints as a save leaves them, made by hand: small files, a manifest, an owner."""

import os
import time
from pathlib import Path

import msgspec
import xxhash

from trainer_sdk.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Identity,
    Manifest,
    ShardFile,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.storage import storage_for

SAVED_AT = "2026-11-21T07:00:00+00:00"


def save(
    place: str, job: str, step: int, *, ranks: int = 2, size: int = 4096, inside: str = ""
) -> str:
    """Publish a checkpoint; the hash of its manifest. `inside`: where its files are below it."""
    storage = storage_for(place)
    assert storage.put_if_absent("owner.json", msgspec.json.encode({"job": job}))
    files = []
    for rank in range(ranks):
        octets = bytes((step + rank + place_) % 251 for place_ in range(size))
        files.append(_put(place, step, f"{inside}__{rank}_0.distcp", octets))
    files.append(_put(place, step, f"{inside}{METADATA}", b"torch's own"))
    identity = Identity(job=job, round=1, step=step, world_size=ranks, layout="layout")
    manifest = Manifest(
        identity=identity,
        files=tuple(files),
        saved_at=SAVED_AT,
        has_data_position=True,
        is_readable=True,
    )
    octets = encode(manifest)
    storage.put(f"{step_name(step)}/{MANIFEST}", (octets,))
    return xxhash.xxh3_128_hexdigest(octets)


def leave(place: str, folder: str, *, hours_ago: float = 0.0) -> Path:
    """What a save that died has left in a folder; it is so old."""
    storage_for(place).put(f"{folder}/__0_0.distcp", (b"half",))
    path = Path(place, folder)
    then = time.time() - hours_ago * 3600
    os.utime(path / "__0_0.distcp", (then, then))
    return path


def flip(place: str, step: int, file: str = "__1_0.distcp", at: int = 100) -> None:
    """Change one bit of a file."""
    storage = storage_for(place)
    name = f"{step_name(step)}/{file}"
    octets = bytearray(storage.read(name))
    octets[at] ^= 1
    storage.put(name, (octets,))


def _put(place: str, step: int, name: str, octets: bytes) -> ShardFile:
    storage_for(place).put(f"{step_name(step)}/{name}", (octets,))
    return ShardFile(name=name, size_bytes=len(octets), hash=xxhash.xxh3_128_hexdigest(octets))
