"""The items of torch's plan on a rank: their data, and their places in the rank's buffer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from trainer_sdk.checkpoint.flat_state import StatePiece, is_bare
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.values import UnreadableValueError, as_bytes, read_value
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.plan import (
    PAGE_BYTES,
    PlacedPiece,
    place_bare,
    place_pieces,
    put,
    up,
)
from trainer_sdk.integrations.dcp.image import described_items, entries_of


@dataclass(frozen=True, slots=True)
class ItemPlaces:
    """Where the items of a rank lie in its buffer: first its shard file, then the rest."""

    placed: list[PlacedPiece]
    file_bytes: int
    image_bytes: int
    extra_at: int
    described: bytes
    """The items, at `extra_at` in the image."""
    entries: bytes
    """The entries of the image, which follow it."""

    @classmethod
    def of(
        cls, items: Sequence[WriteItem], pieces: Sequence[StatePiece], own: int, *, is_kept: bool
    ) -> "ItemPlaces":
        """The places of all items; the first `own` of them are saved by this rank."""
        placed, end = place_pieces(pieces, range(own), 0)
        file_bytes = up(end, PAGE_BYTES)
        if not is_kept:
            return cls(placed, file_bytes, file_bytes, file_bytes, b"", b"")
        more, end = place_bare(pieces, range(own, len(pieces)), file_bytes)
        placed += more
        described = described_items(items, pieces, placed)
        image_bytes = up(end + len(described), PAGE_BYTES)
        return cls(placed, file_bytes, image_bytes, end, described, entries_of(end, len(described)))

    @property
    def extra(self) -> bytes:
        """All bytes from `extra_at`."""
        gap = self.image_bytes - self.extra_at - len(self.described)
        return self.described + bytes(gap) + self.entries

    @property
    def size(self) -> int:
        """Of the image and its entries, in whole pages."""
        return up(self.image_bytes + len(self.entries), PAGE_BYTES)


def planned_piece(item: WriteItem) -> StatePiece:
    """An item as all ranks plan it, before any rank has its data."""
    about = item.tensor_data
    if about is None:
        return StatePiece(item.index.fqn, (), 0, is_bare=False)
    return StatePiece(
        key=item.index.fqn,
        path=(),
        length=0,
        is_bare=False,
        dtype=str(about.properties.dtype).removeprefix("torch."),
        shape=tuple(about.size),
        offsets=tuple(about.chunk.offsets),
        sizes=tuple(about.chunk.sizes),
    )


def data_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor | bytes:
    """The tensor to copy, or the bytes of another value, which a restore must be able to read."""
    value = planner.resolve_data(item)
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return tensor if is_bare(tensor) else as_bytes(tensor, item.index.fqn)
    octets: bytes = value.getvalue()
    if item.type is WriteItemType.BYTE_IO:
        try:
            return as_bytes(read_value(octets, item.index.fqn), item.index.fqn)
        except UnfitError as error:
            raise UnreadableValueError(str(error)) from error
    return octets


def piece_of(item: WriteItem, data: torch.Tensor | bytes) -> StatePiece:
    """An item as this rank stores it."""
    if isinstance(data, bytes):
        return StatePiece(item.index.fqn, (), len(data), is_bare=False)
    return StatePiece(
        key=item.index.fqn,
        path=(),
        length=data.nbytes,
        is_bare=True,
        dtype=str(data.dtype).removeprefix("torch."),
        sizes=tuple(data.shape),
    )


def copy_into(buffer: Buffer, place: PlacedPiece, data: torch.Tensor | bytes) -> None:
    """Copy an item to its place, with the bytes of `torch.save` around it where it has them."""
    begin, end = place.offset, place.offset + place.length
    if isinstance(data, bytes):
        put(buffer, begin, data, place.length)
    else:
        put(buffer, begin - len(place.head), place.head, len(place.head))
        if place.length:
            buffer.octets[begin:end].view(data.dtype).view(data.shape).copy_(data)
    put(buffer, end, place.tail, len(place.tail))
