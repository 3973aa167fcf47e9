"""An image in the memory of this node: checked whole, then copied into the live tensors.

The image is mapped, so the check and the load read the memory directly. If the file were shortened
meanwhile, this process would die, so a save closes the image before. A process that overwrites the
image removes its index first, so the index is checked once more after the load.
"""

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from everstep.evidence.files import open_regular, read_regular
from everstep.hashing import Hasher
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    BadManifestError,
    Identity,
    ImageEntry,
    ImageIndex,
    decode,
)
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.optimizer_state import Form
from trainer_sdk.checkpoint.restore.target import (
    Target,
    check_fit,
    check_parameters,
    check_values,
    fill,
    local,
)
from trainer_sdk.checkpoint.restore.values import read_value

_PIECE_BYTES = 1 << 20
_HASHED_BYTES = 16 << 20
_FILE_CLOCK = 5
"""CLOCK_REALTIME_COARSE, from which the kernel takes the times of files."""


@dataclass(frozen=True, slots=True)
class ImageStamp:
    """An image as it was when all its bytes were verified, for a later load by this process.

    The later load skips the hash only if `StoredImage.reopen` finds the same index and file. That
    is safe, as no byte changes without one of them: a save removes the index before it changes the
    image, and then writes an index with another hash; whatever else writes to the file, cuts it
    short or replaces it changes its times, size or number. These times advance by the ticks of a
    clock, so a file that has changed in the present tick is verified again.
    """

    folder: str
    identity: Identity
    index_octets: bytes
    file: tuple[int, ...]
    """Device, number, size and times of the file, from before its first byte was read."""


@dataclass(frozen=True, slots=True)
class _OpenImage:
    """An image whose bytes can be read."""

    index: ImageIndex
    index_octets: bytes
    mapping: mmap.mmap | None
    octets: torch.Tensor
    file: tuple[int, ...]
    """As in `ImageStamp`; empty for a file that has changed in the present tick."""


class StoredImage:
    """The image of one rank, in its folder."""

    def __init__(self, folder: str, identity: Identity) -> None:
        self._folder = Path(folder)
        self._identity = identity
        self._index: ImageIndex | None = None
        self._index_octets = b""
        """The bytes of the index."""
        self._file: tuple[int, ...] = ()
        self._mapping: mmap.mmap | None = None
        self._octets: torch.Tensor | None = None
        self._values: dict[str, object] = {}
        self.ignored: tuple[str, ...] = ()
        """The keys that no rank has a place for."""

    def verify(self, is_over: threading.Event | None = None) -> None:
        """Check the hash of all bytes; `UnfitError` if it differs, or `is_over` is set."""
        opened = self._open()
        content_hash = _hash(opened.octets.numpy().data, is_over)
        if content_hash != opened.index.hash:
            raise UnfitError(
                f"{self._folder / IMAGE} differs from what was saved: its hash is {content_hash}, "
                f"and was {opened.index.hash}"
            )
        self._take(opened)

    def reopen(self, earlier: ImageStamp) -> bool:
        """Take the image as verified if nothing has changed since then; else return False."""
        try:
            opened = self._open()
        except UnfitError:
            return False
        if earlier != self._stamp_of(opened.index_octets, opened.file):
            return False
        self._take(opened)
        return True

    @property
    def stamp(self) -> ImageStamp | None:
        """Of a verified image; None if its file had changed too recently."""
        if not self._file:
            return None
        return self._stamp_of(self._index_octets, self._file)

    @property
    def size_bytes(self) -> int:
        """Of a verified image."""
        assert self._index is not None
        return self._index.size_bytes

    def entry(self, key: str) -> ImageEntry | None:
        """The entry of this key in a verified image; None if there is none."""
        assert self._index is not None
        return next((entry for entry in self._index.entries if entry.key == key), None)

    def octets(self, entry: ImageEntry) -> torch.Tensor:
        """The bytes of an entry of a verified image."""
        assert self._octets is not None
        return self._octets[entry.offset : entry.offset + entry.length]

    def check_unchanged(self) -> None:
        """`UnfitError` if another state was written over the image since it was verified."""
        try:
            present = read_regular(self._folder / INDEX)
        except OSError as error:
            raise self._overwritten() from error
        if present != self._index_octets:
            raise self._overwritten()

    def fit(self, target: Target) -> None:
        """Compare the image with the live state, and read the values that are not tensors."""
        assert self._index is not None
        self.check_unchanged()  # it may have changed since it was verified
        for key, live in target.tensors.items():
            if isinstance(live, ShardedTensor):
                raise UnfitError(
                    f"{key} is a ShardedTensor, which is loaded from the global tier only: use "
                    "DTensor, as FSDP2 does"
                )
        forms = forms_of(self._index)
        saved = {key: form for key, form in forms.items() if form is not None}
        others = {entry.key: entry for entry in self._index.entries if not entry.dtype}
        self._values.clear()
        target.begin_with(forms)
        wanted = {
            key: (tensor.dtype, tuple(local(tensor).shape))
            for key, tensor in target.tensors.items()
            if key not in others  # a sparse or quantized tensor is among the other values
        }
        self.ignored = check_fit(target, wanted, saved, others)
        for key, entry in others.items():
            if key in target.values:
                self._values[key] = read_value(self.octets(entry).numpy().tobytes(), key)
        check_values(target, self._values)
        check_parameters(target, self._values)

    def load(self, target: Target) -> int:
        """Copy the image into the live state; returns its size."""
        assert self._index is not None
        tensors = target.tensors
        for entry in self._index.entries:
            if entry.key in tensors and entry.dtype and not target.is_kept(entry.key):
                self._copy(entry, local(tensors[entry.key]))
                target.loaded(entry.key)
        self._put_values(target, tensors)
        self.check_unchanged()
        return self._index.size_bytes

    def close(self) -> None:
        """Unmap the image in a thread, as that takes time."""
        mapping, self._mapping, self._octets = self._mapping, None, None
        if mapping is not None:
            threading.Thread(
                target=_unmap, args=(mapping,), name="everstep-unmap", daemon=True
            ).start()

    def _open(self) -> _OpenImage:
        path = self._folder / IMAGE
        try:
            index_octets = read_regular(self._folder / INDEX)
            index = decode(index_octets, ImageIndex, str(self._folder))
            mapping, file = _mapped(path, index.size_bytes)
        except (OSError, BadManifestError) as error:
            raise UnfitError(f"{self._folder} cannot be read: {error}") from error
        if index.identity != self._identity:
            raise self._overwritten()
        octets = torch.empty(0, dtype=torch.uint8, device="cpu")
        if mapping is not None:
            octets = torch.frombuffer(mapping, dtype=torch.uint8)
        return _OpenImage(index, index_octets, mapping, octets, file)

    def _take(self, opened: _OpenImage) -> None:
        self._index, self._index_octets = opened.index, opened.index_octets
        self._mapping, self._octets = opened.mapping, opened.octets
        self._file = opened.file

    def _stamp_of(self, index_octets: bytes, file: tuple[int, ...]) -> ImageStamp:
        return ImageStamp(str(self._folder), self._identity, index_octets, file)

    def _overwritten(self) -> UnfitError:
        return UnfitError(f"{self._folder} was overwritten by another state meanwhile")

    def _copy(self, entry: ImageEntry, live: torch.Tensor) -> None:
        is_direct = live.is_cpu and live.is_contiguous()
        filled = live
        if not is_direct:
            filled = torch.empty(
                live.shape, dtype=live.dtype, device="cpu", pin_memory=live.is_cuda
            )
        fill(filled.view(-1).view(torch.uint8), self.octets(entry))
        if not is_direct:
            fill(live, filled)

    def _put_values(self, target: Target, tensors: dict[str, torch.Tensor]) -> None:
        for key, value in self._values.items():
            if target.is_kept(key):
                continue
            if key in tensors and isinstance(value, torch.Tensor):
                # A copy into such a tensor, detached, would not reach the original.
                is_whole = value.layout != torch.strided or value.is_quantized
                fill(tensors[key] if is_whole else local(tensors[key]), value)
                target.loaded(key)
            else:
                target.put(key, value)


def forms_of(index: ImageIndex) -> dict[str, Form | None]:
    """The form of each tensor in an image, and None for each other value."""
    return {entry.key: _form(entry) if entry.dtype else None for entry in index.entries}


def _hash(octets: memoryview, is_over: threading.Event | None) -> str:
    hasher = Hasher()
    for at in range(0, len(octets), _HASHED_BYTES):
        hasher.update(octets[at : at + _HASHED_BYTES])
        if is_over is not None and is_over.is_set():
            raise UnfitError("the restore has ended before it was verified")
    return hasher.hexdigest()


def _mapped(path: Path, size: int) -> tuple[mmap.mmap | None, tuple[int, ...]]:
    """The bytes of a file, and its device, number, size and times unless these are of now."""
    with open_regular(path) as file:
        now_ns = time.clock_gettime_ns(_FILE_CLOCK)
        about = os.fstat(file.fileno())
        if about.st_size < size:
            raise UnfitError(f"{path} is cut short: {about.st_size} of {size} bytes")
        times = about.st_mtime_ns, about.st_ctime_ns
        is_settled = max(times) < now_ns
        stamp = (about.st_dev, about.st_ino, about.st_size, *times) if is_settled else ()
        if not size:
            return None, stamp
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), stamp


def _unmap(mapping: mmap.mmap) -> None:
    """Unmap piece by piece, as other threads cannot allocate memory during a call."""
    for at in range(0, len(mapping), _PIECE_BYTES):
        mapping.madvise(mmap.MADV_DONTNEED, at, min(_PIECE_BYTES, len(mapping) - at))
        time.sleep(0)  # lets other threads run
    mapping.close()


def _form(entry: ImageEntry) -> Form:
    dtype = getattr(torch, entry.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UnfitError(f"{entry.key} is of type {entry.dtype}, which this torch does not know")
    return dtype, entry.shape
