"""What of a buffer is no copy of a tensor: what is around them, and values as bytes."""

import torch

from trainer_sdk.checkpoint.flat_state import Piece
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.save.plan import Plan


def fill(buffer: Buffer, plan: Plan) -> None:
    """Write what stays the same from save to save."""
    octets, pieces = buffer.octets, plan.local.pieces
    buffer.targets = []
    for one in plan.placed:
        end = one.offset + one.length
        put(buffer, one.offset - len(one.head), one.head, len(one.head))
        put(buffer, end, one.tail, len(one.tail))
        buffer.targets.append(_as_tensor(octets[one.offset : end], pieces[one.number]))
    put(buffer, plan.image_bytes, plan.beside, plan.beside_bytes)
    buffer.filled_for = plan


def _as_tensor(octets: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The room of a piece, as its own kind of tensor."""
    if not piece.is_bare:
        return octets
    dtype = getattr(torch, piece.dtype)
    if not piece.length:
        return torch.empty(piece.sizes, dtype=dtype, device="cpu")
    return octets.view(dtype).view(piece.sizes)


def put(buffer: Buffer, at: int, octets: bytes, room: int) -> None:
    """Some bytes, and zeros up to the end of their room."""
    if octets:
        source = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        buffer.octets[at : at + len(octets)].copy_(source)
    buffer.octets[at + len(octets) : at + room].zero_()
