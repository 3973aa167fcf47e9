"""The plan of a save: which rank saves which tensors, and their places in its image.

Every rank describes its state to all others, and each makes the same plan from the descriptions, by
torch's own planner, so that `torch.distributed.checkpoint` can read the files. A plan is used again
while it fits.
"""

import io
import pickle  # noqa: TID251 - torch's metadata is one; it is written here, and never read
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.flat_state import FlatState, LocalForm, StatePiece, found_at
from trainer_sdk.checkpoint.manifest import ImageEntry
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.description import (
    Description,
    PlanError,
    buffers_in,
    check_names,
    form_of,
    index_of,
    numbering_of,
    offered,
    shared_pieces,
)
from trainer_sdk.checkpoint.torch_format import around

PAGE_BYTES = 4096
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """The place of a piece of the state in the image."""

    number: int
    """The number of the piece, among this rank's."""
    offset: int
    """Of the data of the piece."""
    length: int
    head: bytes = b""
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces that a rank writes at each save, and their places."""

    local: LocalForm
    """The form of the states that the plan fits."""
    placed: tuple[PlacedPiece, ...]
    """First the pieces of the shard file, then those that other ranks write for all."""
    values: tuple[int, ...]
    """The numbers of the pieces that are copied as bytes."""
    file_bytes: int
    image_bytes: int
    entries: bytes
    """The entries of the image, as JSON."""
    metadata: bytes
    """For torch's loader; only rank 0 has it."""
    layout: str
    mark: str
    """A random mark of rank 0, the same on all ranks."""
    shared: tuple[tuple[int, ...], ...] = ()
    """The numbers of pieces that should be the same on several ranks, by these ranks."""

    @property
    def extra(self) -> bytes:
        """Metadata and entries, which follow the image in the buffer."""
        return self.metadata + self.entries

    @property
    def arena_bytes(self) -> int:
        """The size of image and `extra`."""
        return self.image_bytes + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """The size of `extra`, in whole pages."""
        return up(len(self.metadata) + len(self.entries), PAGE_BYTES)


def make_plan(
    flat: FlatState,
    group: RankGroup,
    mark: str,
    *,
    with_all: bool,
    state: Mapping[str, Any] | None = None,
    to_files: bool = True,
) -> Plan:
    """Plan together with all ranks; `with_all` puts a rank's whole state into its image.

    `state` has the objects that `flat` was made from. Only files need names that all ranks share.
    """
    local, error = form_of(flat)
    state = {} if error or state is None else state
    buffers, numbering = buffers_in(state, flat), numbering_of(state) if to_files else {}
    told = group.gather(Description(local.pieces, mark, error, buffers, numbering), Description)
    for rank, description in enumerate(told):
        if description.error:
            raise PlanError(f"rank {rank} has a state that cannot be saved: {description.error}")
    if to_files:
        check_names(told)
    planner = DefaultSavePlanner()
    try:  # the public one keeps plans for the whole process
        plans, metadata = planner._create_global_plan(offered(told))  # noqa: SLF001
    except (ValueError, AssertionError) as error:
        raise PlanError(f"the shards of its ranks do not fit together: {error}") from error
    mine = _kept(local.pieces, plans[group.rank])
    placed, file_bytes = place_pieces(local.pieces, mine, 0)
    file_bytes = up(file_bytes, PAGE_BYTES)
    image_bytes = file_bytes
    if with_all:
        others = sorted(set(range(len(local.pieces))) - set(mine))
        more, image_bytes = place_bare(local.pieces, others, file_bytes)
        placed += more
        image_bytes = up(image_bytes, PAGE_BYTES)
    if group.rank == 0:
        metadata.storage_data = _storage_data(told, plans)
        metadata.version = CURRENT_DCP_VERSION
    return Plan(
        local=local,
        placed=tuple(placed),
        values=tuple(at.number for at in placed if not local.pieces[at.number].is_bare),
        file_bytes=file_bytes,
        image_bytes=image_bytes,
        entries=msgspec.json.encode(_entries(local.pieces, placed)) if with_all else b"",
        metadata=_pickled(metadata) if group.rank == 0 else b"",
        layout=layout_of([description.pieces for description in told]),
        mark=told[0].mark,
        shared=shared_pieces(told, group.rank),
    )


def shard_name(rank: int) -> str:
    """The file of a rank, as torch names it."""
    return f"__{rank}_0.distcp"


def layout_of(pieces: Sequence[Sequence[StatePiece]]) -> str:
    """The hash of keys, shapes, dtypes and shardings of all ranks."""
    forms = [
        [
            (piece.key, piece.dtype, piece.shape, piece.offsets, piece.sizes)
            for piece in rank
            if piece.dtype
        ]
        for rank in pieces
    ]
    return hash_of(msgspec.json.encode(forms))


def _kept(pieces: Sequence[StatePiece], plan: SavePlan) -> list[int]:
    wanted = {item.index for item in plan.items}
    return [number for number, piece in enumerate(pieces) if index_of(piece) in wanted]


def place_pieces(
    pieces: Sequence[StatePiece], numbers: Sequence[int], at: int
) -> tuple[list[PlacedPiece], int]:
    """Place pieces as in a file: with the bytes that `torch.save` writes around each tensor."""
    placed = []
    for number in numbers:
        piece = pieces[number]
        head, tail = (
            around(getattr(torch, piece.dtype), piece.sizes) if piece.is_bare else (b"",) * 2
        )
        end = at + len(head) + piece.length + len(tail)
        tail += bytes(up(end, _ALIGNED) - end)
        placed.append(PlacedPiece(number, at + len(head), piece.length, head, tail))
        at = up(end, _ALIGNED)
    return placed, at


def place_bare(
    pieces: Sequence[StatePiece], numbers: Sequence[int], at: int
) -> tuple[list[PlacedPiece], int]:
    """Place pieces without the bytes of `torch.save` around them."""
    placed = []
    for number in numbers:
        placed.append(PlacedPiece(number, at, pieces[number].length))
        at = up(at + pieces[number].length, _ALIGNED)
    return placed, at


def _storage_data(
    told: Sequence[Description], plans: Sequence[SavePlan]
) -> dict[MetadataIndex, _StorageInfo]:
    places = {}
    for rank, (description, plan) in enumerate(zip(told, plans, strict=True)):
        for placed in place_pieces(description.pieces, _kept(description.pieces, plan), 0)[0]:
            begin = placed.offset - len(placed.head)
            length = len(placed.head) + placed.length + len(placed.tail)
            index = index_of(description.pieces[placed.number])
            places[index] = _StorageInfo(shard_name(rank), begin, length)
    return places


def _entries(pieces: Sequence[StatePiece], placed: Sequence[PlacedPiece]) -> tuple[ImageEntry, ...]:
    times = Counter(piece.key for piece in pieces)
    return tuple(_entry(pieces[place.number], place, times) for place in placed)


def _entry(piece: StatePiece, placed: PlacedPiece, times: Mapping[str, int]) -> ImageEntry:
    shard = f"@{','.join(map(str, piece.offsets))}" if times[piece.key] > 1 else ""
    return ImageEntry(
        key=piece.key + shard,
        offset=placed.offset,
        length=placed.length,
        dtype=f"torch.{piece.dtype}" if piece.is_bare else "",
        shape=piece.sizes if piece.is_bare else (),
    )


def _pickled(metadata: Metadata) -> bytes:
    octets = io.BytesIO()
    pickle.dump(metadata, octets)
    return octets.getvalue()


def up(size: int, to: int) -> int:
    """The size, rounded up to a multiple of `to`."""
    return -(-size // to) * to


def fill(buffer: Buffer, plan: Plan) -> None:
    """Write the parts of a buffer that are the same at each save."""
    octets, pieces = buffer.octets, plan.local.pieces
    buffer.targets = []
    for placed in plan.placed:
        end = placed.offset + placed.length
        put(buffer, placed.offset - len(placed.head), placed.head, len(placed.head))
        put(buffer, end, placed.tail, len(placed.tail))
        buffer.targets.append(_as_tensor(octets[placed.offset : end], pieces[placed.number]))
    put(buffer, plan.image_bytes, plan.extra, plan.extra_bytes)
    buffer.filled_for = plan


def _as_tensor(octets: torch.Tensor, piece: StatePiece) -> torch.Tensor:
    """The place of a piece in the buffer, as a tensor of its type and shape."""
    if not piece.is_bare:
        return octets
    dtype = getattr(torch, piece.dtype)
    if not piece.length:
        return torch.empty(piece.sizes, dtype=dtype, device="cpu")
    return octets.view(dtype).view(piece.sizes)


def put(buffer: Buffer, at: int, octets: bytes, room: int) -> None:
    """Write some bytes, and zeros up to the end of their place."""
    if octets:
        source = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        buffer.octets[at : at + len(octets)].copy_(source)
    buffer.octets[at + len(octets) : at + room].zero_()


@dataclass(frozen=True, slots=True)
class FileStretch:
    """A stretch of the file, whose bytes are made when a window needs them."""

    begin: int
    length: int
    make: Callable[[], torch.Tensor]


def window_for(plan: Plan, limit_bytes: int) -> int:
    """The size of a window of the file, so that window and `extra` fit into the memory."""
    return (limit_bytes - plan.extra_bytes) // PAGE_BYTES * PAGE_BYTES


def stretches(plan: Plan, flat: FlatState, values: dict[int, bytes]) -> list[FileStretch]:
    """The stretches of the whole file."""
    whole = []
    for placed in plan.placed:
        octets = values.get(placed.number)
        whole.append(_of_bytes(placed.offset - len(placed.head), placed.head))
        if octets is None:
            bare = partial(_bare, flat, plan.local.indices[placed.number])
            whole.append(FileStretch(placed.offset, placed.length, bare))
        else:
            whole.append(_of_bytes(placed.offset, octets))
        whole.append(_of_bytes(placed.offset + placed.length, placed.tail))
    return [stretch for stretch in whole if stretch.length]


def fill_window(window: torch.Tensor, at: int, whole: list[FileStretch]) -> None:
    """Fill a window that begins at `at`."""
    end = at + len(window)
    window.zero_()
    for stretch in whole:
        first, last = max(stretch.begin, at), min(stretch.begin + stretch.length, end)
        if first < last:
            window[first - at : last - at].copy_(
                stretch.make()[first - stretch.begin : last - stretch.begin]
            )


def windows(size: int, window: int) -> Iterator[tuple[int, int]]:
    """The begin and length of each window."""
    return ((at, min(window, size - at)) for at in range(0, size, window))


def _of_bytes(begin: int, octets: bytes) -> FileStretch:
    return FileStretch(
        begin, len(octets), lambda: torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    )


def _bare(flat: FlatState, index: MetadataIndex) -> torch.Tensor:
    tensor: torch.Tensor = found_at(flat, index)
    return tensor.contiguous().reshape(-1).view(torch.uint8)
