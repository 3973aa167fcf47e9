"""A few values of tensors, to find out whether somebody has written over them meanwhile.

torch counts the changes of a tensor, but not those through `.data`, a NumPy view, a CUDA graph or
another process. Whoever writes over all of a tensor changes these values, too; a few elements may
be changed without it.
"""

from collections.abc import Sequence

import torch

POINTS = 16
"""Of each tensor, from its first value to about its last."""
SMALL_BYTES = 32 << 10
"""So much is copied as fast as looked at."""
_JOINED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128}
)
"""What torch can join on every device; others are looked at as bytes."""


class Samples:
    """Of some tensors, all on one device and larger than `SMALL_BYTES`, as they are now."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._numbers: dict[torch.dtype, list[int]] = {}
        for number, one in enumerate(tensors):
            self._numbers.setdefault(one.dtype, []).append(number)
        with torch.no_grad():
            self._values = {
                kind: torch.cat([_some(tensors[one]) for one in numbers])
                for kind, numbers in self._numbers.items()
            }

    def go_to_host(self, stream: torch.cuda.Stream) -> None:
        """When this stream, which is the present one, comes to it."""
        for kind, values in self._values.items():
            values.record_stream(stream)
            self._values[kind] = values.to("cpu", non_blocking=True)

    def first_other(self, other: "Samples") -> int | None:
        """Which tensor has other values there, bit by bit. Both are on the host."""
        for kind, numbers in self._numbers.items():
            ours, theirs = (
                one._values[kind].view(torch.uint8).view(len(numbers), -1)  # noqa: SLF001 - ours
                for one in (self, other)
            )
            if not torch.equal(ours, theirs):
                return numbers[int((ours != theirs).any(1).nonzero()[0])]
        return None


def _some(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor if tensor.dtype in _JOINED else tensor.view(torch.uint8)
    step = (found.numel() - 1) // (POINTS - 1)
    if found.is_contiguous():
        return found.as_strided((POINTS,), (step,))
    at = torch.arange(POINTS, device=found.device) * step
    return found[torch.unravel_index(at, found.shape)]
