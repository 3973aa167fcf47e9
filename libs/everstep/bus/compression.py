"""How the body of a document is stored: as it is when small, compressed when large."""

import zstandard

from everstep.bus.errors import DocumentDamagedError, MessageTooLargeError

COMPRESSED_ABOVE_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
"""The most bytes that a stored body may have after decompression."""

_MAGIC = zstandard.FRAME_HEADER
_LEVEL = 1


def packed(data: bytes, name: str) -> bytes:
    """Return the bytes to store. A body that looks like a compressed one is compressed, too."""
    if len(data) > MAX_BODY_BYTES:
        raise MessageTooLargeError(name, len(data), MAX_BODY_BYTES)
    if len(data) <= COMPRESSED_ABOVE_BYTES and not data.startswith(_MAGIC):
        return data
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def unpacked(stored: bytes, name: str) -> bytes:
    """Return the body as it was written; `DocumentDamagedError` when that is impossible."""
    if not stored.startswith(_MAGIC):
        return stored
    try:
        # The frame states its own size: refuse it before any memory is allocated.
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= MAX_BODY_BYTES:
            says = "does not say its size" if size < 0 else f"says that it has {size} bytes"
            raise DocumentDamagedError(name, f"it {says}, and {MAX_BODY_BYTES} is the limit")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DocumentDamagedError(name, str(error)) from error
