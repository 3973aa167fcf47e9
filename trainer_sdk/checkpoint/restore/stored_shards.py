"""A checkpoint of the global tier: all ranks verify its files together, and each reads its part."""

import math
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapreplace

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from everstep.hashing import Hasher, hash_of
from trainer_sdk.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    BadManifestError,
    Identity,
    Manifest,
    NewerManifestError,
    ShardFile,
    decode,
)
from trainer_sdk.checkpoint.restore.errors import CorruptError, UnfitError
from trainer_sdk.checkpoint.restore.target import (
    Target,
    check_fit,
    check_parameters,
    check_values,
    fill,
    local,
    named,
)
from trainer_sdk.checkpoint.restore.torch_metadata import read_metadata
from trainer_sdk.checkpoint.restore.values import read_tensor, read_value
from trainer_sdk.checkpoint.storage import Storage, StorageError
from trainer_sdk.checkpoint.storage.port import ByteRange, read_ranges, size_flaw
from trainer_sdk.checkpoint.torch_format import inside

_BLOCK_BYTES = 16 << 20


class StoredShards:
    """A checkpoint of the global tier."""

    def __init__(self, storage: Storage, name: str, identity: Identity) -> None:
        self._storage = storage
        self._name = name
        self._identity = identity
        self._place = f"{storage.url}/{name}"
        self._manifest = b""
        self._files: dict[str, ShardFile] = {}
        self._inside = ""
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=True)
        self._metadata: Metadata | None = None
        self._plan = LoadPlan([])
        self._values: dict[str, object] = {}
        self.ignored: tuple[str, ...] = ()
        """The keys that no rank has a place for."""
        self.verified_bytes = 0
        """The size of this rank's share of the files."""

    def verify(self, rank: int, world_size: int) -> None:
        """Verify a rank's share of the files."""
        files = share(self._open(), rank, world_size)
        with self._unless_gone():
            for file in files:
                self._check(file)
        self.verified_bytes = sum(file.size_bytes for file in files)

    def describe(self) -> Metadata:
        """Torch's metadata, verified: for planners of torch."""
        self._open()
        with self._unless_gone():
            return self._read_metadata()

    def verify_for(self, items: Sequence[ReadItem]) -> None:
        """Verify every file that has any of these items; `describe` comes first."""
        names = {self._range(item).file.removeprefix(f"{self._name}/") for item in items}
        with self._unless_gone():
            for name in sorted(names):
                self._check(self._files[name])

    def _open(self) -> Sequence[ShardFile]:
        """Read the manifest; returns its files."""
        try:
            octets = self._storage.read(f"{self._name}/{MANIFEST}")
            manifest = decode(octets, Manifest, f"{self._place}/{MANIFEST}")
        except NewerManifestError as error:
            raise UnfitError(str(error)) from error
        except BadManifestError as error:
            raise CorruptError(str(error)) from error
        except StorageError as error:
            raise UnfitError(str(error)) from error
        if manifest.identity != self._identity:
            raise UnfitError(f"{self._place} was replaced by another checkpoint meanwhile")
        self._manifest = octets
        self._files = {file.name: file for file in manifest.files}
        return manifest.files

    def fit(self, target: Target) -> None:
        """Compare the checkpoint with the live state, and read the values that are not tensors."""
        with self._unless_gone():
            described = self._read_metadata()
        kinds = described.state_dict_metadata
        self._values.clear()
        saved = {
            key: (description.properties.dtype, tuple(description.size))
            for key, description in kinds.items()
            if isinstance(description, TensorStorageMetadata)
        }
        target.begin_with({key: saved.get(key) for key in kinds})
        wanted = {
            key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in target.tensors.items()
        }
        self.ignored = check_fit(target, wanted, saved, kinds.keys() - saved.keys())
        asked = {key: value for key, value in target.values.items() if not target.is_kept(key)}
        self._planner.set_up_planner(asked, described)
        plan = self._planner.finish_plan(self._planner.create_local_plan())
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item, octets in self.read(values):
            key = item.dest_index.fqn
            self._values[key] = read_value(bytes(octets), key)
        check_values(target, self._values)
        check_parameters(target, self._values)
        self._check_whole(target, plan, saved)
        self._metadata, self._plan = described, plan

    def _check_whole(self, target: Target, plan: LoadPlan, saved: Collection[str]) -> None:
        """`UnfitError` if the saved parts of a tensor leave gaps in what this rank has of it."""
        read: Counter[str] = Counter()
        for item in plan.items:
            read[item.dest_index.fqn] += math.prod(item.lengths)
        torn = [
            key
            for key, live in target.tensors.items()
            if key in saved
            and not target.is_kept(key)
            and not isinstance(live, ShardedTensor)
            and read[key] < local(live).numel()
        ]
        if torn:
            raise UnfitError(f"{self._place} has only parts of {named(torn)}")

    def load(self, target: Target) -> int:
        """Read the checkpoint into the live state; returns the number of bytes read."""
        size = 0
        tensors = [
            item
            for item in self._plan.items
            if item.type != LoadItemType.BYTE_IO and not target.is_kept(item.dest_index.fqn)
        ]
        for item, octets in self.read(tensors):
            size += len(octets)
            live = self._planner.resolve_tensor(item)
            # The scale of a detached quantized tensor would not reach the original.
            fill(live if live.is_quantized else live.detach(), self.part(item, octets))
        assert self._metadata is not None
        for key in target.tensors.keys() & self._metadata.state_dict_metadata.keys():
            if not target.is_kept(key):  # also if this rank has no rows of it, and reads nothing
                target.loaded(key)
        for key, value in self._values.items():
            if not target.is_kept(key):
                target.put(key, value)
        return size

    def part(self, item: ReadItem, octets: memoryview) -> torch.Tensor:
        """The part of a saved tensor that an item asks for, from its saved bytes."""
        saved = inside(octets, *self._form(item))
        if saved is None:
            saved = read_tensor(bytes(octets), item.dest_index.fqn)
        part: torch.Tensor = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
        return part

    def close(self) -> None:
        """Do nothing: no file is open."""

    @contextmanager
    def _unless_gone(self) -> Generator[None]:
        """Turn damage into `UnfitError` if the checkpoint was removed or replaced meanwhile."""
        try:
            yield
        except CorruptError as error:
            try:
                there = self._storage.read(f"{self._name}/{MANIFEST}")
            except StorageError as gone:
                raise UnfitError(str(gone)) from error
            if there != self._manifest:
                raise UnfitError(
                    f"{self._place} was replaced by another checkpoint meanwhile"
                ) from error
            raise

    def _check(self, file: ShardFile) -> None:
        place = f"{self._place}/{file.name}"
        hasher = Hasher()
        try:
            flaw = size_flaw(self._storage, f"{self._name}/{file.name}", file.size_bytes)
            if flaw:
                raise CorruptError(flaw)
            for start in range(0, file.size_bytes, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, file.size_bytes - start)
                hasher.update(self._storage.read(f"{self._name}/{file.name}", start, length))
        except StorageError as error:
            raise UnfitError(str(error)) from error
        _compare(place, hasher.hexdigest(), file)

    def _read_metadata(self) -> Metadata:
        """Read torch's metadata; every rank needs it, and verifies it."""
        file = next(
            (candidate for candidate in self._files.values() if _is_metadata(candidate)), None
        )
        if file is None:
            raise UnfitError(f"{self._place}/{METADATA} is not in the manifest")
        place = f"{self._place}/{file.name}"
        try:
            octets = self._storage.read(f"{self._name}/{file.name}", 0, file.size_bytes)
        except StorageError as error:
            raise UnfitError(str(error)) from error
        _compare(place, hash_of(octets), file)
        # In an object store the files of a save are in a separate folder.
        self._inside = file.name.removesuffix(METADATA)
        self._metadata = read_metadata(octets, place)
        return self._metadata

    def read(self, items: Sequence[ReadItem]) -> Iterator[tuple[ReadItem, memoryview]]:
        """The saved bytes of each item, in the order of the files."""
        ranges = [self._range(item) for item in items]
        try:
            for number, octets in read_ranges(self._storage, ranges):
                yield items[number], octets
        except StorageError as error:
            raise UnfitError(str(error)) from error

    def _form(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """The type and shape of the saved tensor, or of the saved part that is read."""
        assert self._metadata is not None
        at, about = item.storage_index, self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(about, TensorStorageMetadata)
        chunk = about.chunks[at.index or 0]  # the planner's index
        if chunk.offsets != at.offset:
            chunk = next(other for other in about.chunks if other.offsets == at.offset)
        return about.properties.dtype, tuple(chunk.sizes)

    def _range(self, item: ReadItem) -> ByteRange:
        assert self._metadata is not None
        where = self._metadata.storage_data[item.storage_index]
        name = self._inside + where.relative_path
        if name not in self._files:
            raise UnfitError(f"{self._place}/{name} is not in the manifest")
        if where.transform_descriptors:
            raise UnfitError(
                f"{item.dest_index.fqn} is stored by an extension of torch, as {where}"
            )
        return ByteRange(f"{self._name}/{name}", where.offset, where.length)


def share(files: Sequence[ShardFile], rank: int, world_size: int) -> list[ShardFile]:
    """The files that this rank verifies: largest first, each to the rank with the least bytes."""
    laden = [(0, number) for number in range(world_size)]
    own = []
    for file in sorted(files, key=lambda candidate: (-candidate.size_bytes, candidate.name)):
        size, least = laden[0]
        heapreplace(laden, (size + file.size_bytes + 1, least))
        if least == rank:
            own.append(file)
    return own


def _is_metadata(file: ShardFile) -> bool:
    return file.name.rpartition("/")[2] == METADATA


def _compare(place: str, content_hash: str, file: ShardFile) -> None:
    if content_hash != file.hash:
        raise CorruptError(
            f"{place} differs from what was saved: its hash is {content_hash}, and was {file.hash}"
        )
