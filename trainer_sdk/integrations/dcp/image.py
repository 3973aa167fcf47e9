"""What an image in the memory of a node has for torch: the items of a rank, and their places.

The image of a rank has all that the rank would load again: the items that it saves, and those that
other ranks save for all. Torch plans a load from the metadata of all ranks, but an image has only
the part of its rank. The rest of each tensor, and all that only other ranks have, is described as
parts without a place, so a load with other shardings, which needs them, is recognized.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem

from trainer_sdk.checkpoint.flat_state import StatePiece
from trainer_sdk.checkpoint.manifest import METADATA, ImageEntry
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.stored_image import StoredImage
from trainer_sdk.checkpoint.restore.values import harmless, read_tensor
from trainer_sdk.checkpoint.save.plan import PlacedPiece

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A part of a tensor: the offset and the length in each dimension."""


class WholeItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor or another value; each rank may have parts of it."""

    key: str
    dtype: str
    requires_grad: bool
    shape: tuple[int, ...]


class ImageItem(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An item of torch's plan, and its place in the image."""

    key: str
    offset: int
    length: int
    dtype: str = ""
    """As `float32`; empty for a value that is not a tensor."""
    is_bare: bool = False
    """Whether the bytes are those of the tensor, rather than the output of `torch.save`."""
    requires_grad: bool = False
    shape: tuple[int, ...] = ()
    """Of the whole tensor; the item is the part at `offsets`."""
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def whole(self) -> WholeItem:
        """The whole tensor or value."""
        return WholeItem(
            key=self.key, dtype=self.dtype, requires_grad=self.requires_grad, shape=self.shape
        )


def described_items(
    items: Sequence[WriteItem], pieces: Sequence[StatePiece], placed: Sequence[PlacedPiece]
) -> bytes:
    """The items and their places, as the image has them; `pieces` says how they are stored."""
    return msgspec.json.encode(
        [
            _described(item, pieces[place.number], place)
            for item, place in zip(items, placed, strict=True)
        ]
    )


def entries_of(begin: int, length: int) -> bytes:
    """The entries of an image whose items are described at `begin`."""
    return msgspec.json.encode((ImageEntry(key=METADATA, offset=begin, length=length),))


def _described(item: WriteItem, piece: StatePiece, place: PlacedPiece) -> ImageItem:
    about = item.tensor_data
    if about is None:
        return ImageItem(key=item.index.fqn, offset=place.offset, length=place.length)
    return ImageItem(
        key=item.index.fqn,
        offset=place.offset,
        length=place.length,
        dtype=str(about.properties.dtype).removeprefix("torch."),
        is_bare=piece.is_bare,
        requires_grad=about.properties.requires_grad,
        shape=tuple(about.size),
        offsets=tuple(about.chunk.offsets),
        sizes=tuple(about.chunk.sizes),
    )


class DcpImage:
    """The verified image of a rank, for torch's planners."""

    def __init__(self, image: StoredImage) -> None:
        entry = image.entry(METADATA)
        if entry is None:
            raise UnfitError("a Checkpointer has saved it, not DcpWriter: restore it by that")
        self._image = image
        octets = image.octets(entry).numpy().tobytes()
        self._all_items = msgspec.json.decode(octets, type=tuple[ImageItem, ...])
        self._items = {
            (item.key, item.offsets): item
            for item in self._all_items
            if not item.dtype or 0 not in item.sizes
        }

    @property
    def wholes(self) -> list[WholeItem]:
        """The tensors and values whose parts this rank has, in the order of their keys."""
        return [
            whole for _, whole in sorted({item.key: item.whole for item in self._all_items}.items())
        ]

    def metadata(self, wholes: Iterable[WholeItem]) -> Metadata:
        """Of this rank's part; the rest of it, and of these others, as parts without a place."""
        own: dict[str, list[Box]] = {}
        for item in self._all_items:
            own.setdefault(item.key, []).append((item.offsets, item.sizes))
        every = {whole.key: whole for whole in (*wholes, *self.wholes)}
        return Metadata(
            state_dict_metadata={
                key: _described_whole(whole, own.get(key, ())) for key, whole in every.items()
            }
        )

    def misfit(self, plan: LoadPlan) -> str:
        """Why this image cannot serve a load: it lacks a part; empty if it can."""
        for item in plan.items:
            if self._key(item) not in self._items:
                return (
                    f"{item.dest_index.fqn} is sharded in another way than it was saved, and the "
                    "memory of a node has the shards of its own ranks"
                )
        return ""

    def values(self, plan: LoadPlan) -> Iterator[tuple[ReadItem, bytes]]:
        """The values that are not tensors, in bytes that torch's planner may unpickle."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                yield item, harmless(self._octets(item).numpy().tobytes(), item.dest_index.fqn)

    def parts(self, plan: LoadPlan) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        """The part of a tensor that each item asks for."""
        for item in plan.items:
            if item.type is not LoadItemType.BYTE_IO:
                yield (
                    item,
                    narrow_tensor_by_index(self._tensor(item), item.storage_offsets, item.lengths),
                )

    def check_unchanged(self) -> None:
        """`UnfitError` if another state was written over the image since it was verified."""
        self._image.check_unchanged()

    def _tensor(self, item: ReadItem) -> torch.Tensor:
        saved, octets = self._items[self._key(item)], self._octets(item)
        if saved.is_bare:
            dtype: torch.dtype = getattr(torch, saved.dtype)
            return octets.view(dtype).view(saved.sizes)
        return read_tensor(octets.numpy().tobytes(), saved.key)

    def _octets(self, item: ReadItem) -> torch.Tensor:
        saved = self._items[self._key(item)]
        place = ImageEntry(key=saved.key, offset=saved.offset, length=saved.length)
        return self._image.octets(place)

    @staticmethod
    def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
        return item.storage_index.fqn, tuple(item.storage_index.offset or ())


def _described_whole(
    whole: WholeItem, own: Sequence[Box]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if not whole.dtype:
        return BytesStorageMetadata()
    dtype = getattr(torch, whole.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnfitError(f"{whole.key} is of type {whole.dtype}, which this torch does not know")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype, requires_grad=whole.requires_grad),
        size=torch.Size(whole.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in (*own, *rest_of(whole.shape, own))
        ],
    )


def rest_of(shape: Sequence[int], parts: Sequence[Box]) -> list[Box]:
    """The parts of a tensor that are not among these; they do not overlap."""
    left: list[Box] = [(tuple(0 for _ in shape), tuple(shape))] if 0 not in shape else []
    for part in parts:
        left = [piece for whole in left for piece in _without(whole, part)]
    return left


def _without(whole: Box, hole: Box) -> list[Box]:
    """The parts of a box that are outside another."""
    begins = list(whole[0])
    ends = [begin + size for begin, size in zip(*whole, strict=True)]
    lows = [max(begin, other) for begin, other in zip(begins, hole[0], strict=True)]
    highs = [min(end, begin + size) for end, begin, size in zip(ends, *hole, strict=True)]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return [whole]
    pieces = []
    for at, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if begins[at] < low:
            pieces.append(_box(begins, [*ends[:at], low, *ends[at + 1 :]]))
        if high < ends[at]:
            pieces.append(_box([*begins[:at], high, *begins[at + 1 :]], ends))
        begins[at], ends[at] = low, high
    return pieces


def _box(begins: Sequence[int], ends: Sequence[int]) -> Box:
    return tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True))
