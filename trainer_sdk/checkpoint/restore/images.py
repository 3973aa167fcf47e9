"""An image in the memory of this node: checked whole, then read into the live tensors.

It is read rather than mapped: a file that somebody cuts short gives an error, and no signal.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    BadManifestError,
    Entry,
    Identity,
    ImageIndex,
    decode,
)
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.fitting import Form, check_fit, read_value
from trainer_sdk.checkpoint.restore.target import Target, local

_HASHED_BYTES = 1 << 20
"""So many at a time stay in the processor's cache between reading and hashing."""
_READ_BYTES = 32 << 20
_THREADS = 4

Piece = tuple[memoryview, int]
"""Where bytes go, and where in the image they are."""


class Image:
    """One rank's state, in its folder."""

    def __init__(self, folder: str, identity: Identity) -> None:
        self._folder = Path(folder)
        self._identity = identity
        self._index: ImageIndex | None = None
        self._file = -1
        self._values: dict[str, object] = {}

    def verify(self) -> None:
        """Every byte is what was saved."""
        path = self._folder / IMAGE
        try:
            index = decode((self._folder / INDEX).read_bytes(), ImageIndex, str(self._folder))
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = self._hash(index.size_bytes)
        except (OSError, BadManifestError) as error:
            raise UnfitError(f"{self._folder} cannot be read: {error}") from error
        if index.identity != self._identity:
            raise UnfitError(f"{self._folder} has become another state meanwhile")
        if found != index.hash:
            raise UnfitError(
                f"{path} is not what was saved: its hash is {found}, and was {index.hash}"
            )
        self._index = index

    def fit(self, target: Target) -> None:
        """Compare it with the live state, and read what is no tensor."""
        assert self._index is not None
        saved = {one.key: _form(one) for one in self._index.entries if one.dtype}
        others = {one.key: one for one in self._index.entries if not one.dtype}
        wanted = {
            key: (one.dtype, tuple(local(one).shape))
            for key, one in target.tensors.items()
            if key not in others  # a sparse or quantized one, which torch has written
        }
        check_fit(target, wanted, saved, others)
        for key, entry in others.items():
            if key in target.values:
                octets = bytearray(entry.length)
                self._read((memoryview(octets), entry.offset))
                self._values[key] = read_value(octets, key)

    def load(self, target: Target) -> int:
        """Read it into the live state; how many bytes that were."""
        assert self._index is not None
        tensors = target.tensors
        pieces: list[Piece] = []
        copied: list[tuple[torch.Tensor, Entry]] = []
        for entry in self._index.entries:
            if entry.key not in tensors or not entry.dtype:
                continue
            live = local(tensors[entry.key])
            if live.is_cpu and live.is_contiguous():
                pieces += _pieces(live, entry)
            else:
                copied.append((live, entry))
            target.loaded(entry.key)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as readers:
            for _ in readers.map(self._read, pieces):
                pass
            for live, entry in copied:
                found = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
                for _ in readers.map(self._read, _pieces(found, entry)):
                    pass
                live.copy_(found)
        self._put_values(target, tensors)
        return self._index.size_bytes

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put_values(self, target: Target, tensors: dict[str, torch.Tensor]) -> None:
        for key, value in self._values.items():
            if key in tensors and isinstance(value, torch.Tensor):
                local(tensors[key]).copy_(value)
                target.loaded(key)
            else:
                target.put(key, value)

    def _hash(self, size: int) -> str:
        buffer = memoryview(bytearray(min(size, _HASHED_BYTES)))
        hasher = xxhash.xxh3_128()
        for at in range(0, size, _HASHED_BYTES):
            part = buffer[: min(_HASHED_BYTES, size - at)]
            self._read((part, at))
            hasher.update(part)
        return hasher.hexdigest()

    def _read(self, piece: Piece) -> None:
        view, at = piece
        while view:
            count = os.preadv(self._file, [view], at)
            if not count:
                raise UnfitError(f"{self._folder / IMAGE} is cut short at {at} bytes")
            view, at = view[count:], at + count


def _form(entry: Entry) -> Form:
    dtype = getattr(torch, entry.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UnfitError(f"{entry.key} is of type {entry.dtype}, which this torch does not know")
    return dtype, entry.shape


def _pieces(tensor: torch.Tensor, entry: Entry) -> Iterator[Piece]:
    view = tensor.view(-1).view(torch.uint8).numpy().data
    for at in range(0, entry.length, _READ_BYTES):
        yield view[at : at + _READ_BYTES], entry.offset + at
