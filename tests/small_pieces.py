"""A writer that writes in small pieces, so that a small state has many: `-m tests.small_pieces`."""

from trainer_sdk.checkpoint.writer import disk
from trainer_sdk.checkpoint.writer.__main__ import main

PIECE_BYTES = 8 << 10


def write_small_pieces() -> None:
    """Have each piece written by itself in this process."""
    disk.CHUNK_BYTES = disk._MOST_CHUNK_BYTES = PIECE_BYTES


if __name__ == "__main__":
    write_small_pieces()
    main()
