"""A process that makes the parts of a state, or reads them: request on stdin, result on stdout.

A state is cut into blocks, and each block into as many rows as are needed; a part has one row of
each block, or one of the rows that were computed from them.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

import msgspec

from everstep.hashing import Hasher

_ROW_BYTES = 256 << 10
Octets = bytes | memoryview


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode"):
    """Make these parts of a state."""

    needed: int
    parts: int
    image: str
    size_bytes: int
    paths: tuple[str, ...]


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Restore a state from these of its parts."""

    needed: int
    parts: int
    numbers: tuple[int, ...]
    paths: tuple[str, ...]
    image: str
    size_bytes: int


Request = Encode | Decode


class CodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result: for each part, or for the state."""

    sizes_bytes: tuple[int, ...]
    hashes: tuple[str, ...]


class Code(Protocol):
    """Computes the rows of a block, and a block from its rows."""

    def rows(self, block: memoryview) -> Sequence[Octets]:
        """One row for each part."""

    def block(self, rows: dict[int, bytes], size: int) -> bytes:
        """The block, from enough of its rows by number."""

    def row_bytes(self, size: int) -> int:
        """The length of the rows of a block of that size."""


class Xor:
    """One part may be missing."""

    def __init__(self, needed: int) -> None:
        self._needed = needed

    def rows(self, block: memoryview) -> Sequence[Octets]:
        length = self.row_bytes(len(block))
        if len(block) % self._needed:
            block = memoryview(bytes(block).ljust(length * self._needed, b"\0"))
        rows = [block[at : at + length] for at in range(0, len(block), length)]
        return [*rows, _xor(rows)]

    def block(self, rows: dict[int, bytes], size: int) -> bytes:
        missing = next((n for n in range(self._needed) if n not in rows), None)
        if missing is not None:
            rows = rows | {missing: _xor(list(rows.values()))}
        return b"".join(rows[number] for number in range(self._needed))[:size]

    def row_bytes(self, size: int) -> int:
        return -(-size // self._needed)


class ReedSolomon:
    """As many parts may be missing as there are beyond those needed."""

    def __init__(self, needed: int, parts: int) -> None:
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError as error:
            raise SystemExit(
                "more than one part beyond those needed takes pyeclib: pip install everstep[ec]"
            ) from error
        self._driver = ECDriver(k=needed, m=parts - needed, ec_type="isa_l_rs_vand")

    def rows(self, block: memoryview) -> Sequence[Octets]:
        encoded: list[bytes] = self._driver.encode(bytes(block))
        return encoded

    def block(self, rows: dict[int, bytes], size: int) -> bytes:
        decoded: bytes = self._driver.decode(list(rows.values()))
        return decoded[:size]

    def row_bytes(self, size: int) -> int:
        return int(self._driver.get_segment_info(size, size)["fragment_size"])


def code_of(needed: int, parts: int) -> Code:
    """The code for this number of parts, and of parts needed."""
    return Xor(needed) if parts == needed + 1 else ReedSolomon(needed, parts)


def encode(asked: Encode) -> CodeResult:
    """Write the parts; return their sizes and hashes."""
    code = code_of(asked.needed, asked.parts)
    hashes = [Hasher() for _ in asked.paths]
    sizes = [0] * asked.parts
    room = memoryview(bytearray(asked.needed * _ROW_BYTES))
    with ExitStack() as stack:
        image = stack.enter_context(open(asked.image, "rb"))
        files = [stack.enter_context(open(path, "wb")) for path in asked.paths]
        for size in _blocks(asked.size_bytes, asked.needed):
            if image.readinto(room[:size]) != size:
                raise SystemExit(f"{asked.image} has become shorter")
            for number, row in enumerate(code.rows(room[:size])):
                files[number].write(row)
                hashes[number].update(row)
                sizes[number] += len(row)
    return CodeResult(sizes_bytes=tuple(sizes), hashes=tuple(each.hexdigest() for each in hashes))


def decode(asked: Decode) -> CodeResult:
    """Write the state; return its size and hash."""
    code, hashed = code_of(asked.needed, asked.parts), Hasher()
    with ExitStack() as stack:
        image = stack.enter_context(open(asked.image, "r+b"))
        files = [stack.enter_context(open(path, "rb")) for path in asked.paths]
        for size in _blocks(asked.size_bytes, asked.needed):
            length = code.row_bytes(size)
            rows = [file.read(length) for file in files]
            block = code.block(dict(zip(asked.numbers, rows, strict=True)), size)
            image.write(block)
            hashed.update(block)
    return CodeResult(sizes_bytes=(asked.size_bytes,), hashes=(hashed.hexdigest(),))


def _blocks(size_bytes: int, needed: int) -> Iterator[int]:
    """The length of each block."""
    length = needed * _ROW_BYTES
    for at in range(0, size_bytes, length):
        yield min(length, size_bytes - at)


def _xor(rows: Sequence[Octets]) -> bytes:
    import numpy as np

    total = np.frombuffer(rows[0], dtype=np.uint8).copy()
    for row in rows[1:]:
        total ^= np.frombuffer(row, dtype=np.uint8)
    return total.tobytes()


def main() -> None:
    """Serve one request."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    made = encode(asked) if isinstance(asked, Encode) else decode(asked)
    sys.stdout.buffer.write(msgspec.json.encode(made))


if __name__ == "__main__":
    main()
