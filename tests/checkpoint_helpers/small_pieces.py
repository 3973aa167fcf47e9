"""A writer that writes in small pieces, so that a small state has many; run with `-m`."""

import os

from trainer_sdk.checkpoint.writer import disk, files
from trainer_sdk.checkpoint.writer.__main__ import main

PIECE_BYTES = 8 << 10


def write_small_pieces() -> None:
    """Have each piece written by itself in this process, or sent by itself to an object store."""
    disk.CHUNK_BYTES = disk._MOST_CHUNK_BYTES = PIECE_BYTES
    vars(files)["CHUNK_BYTES"] = PIECE_BYTES
    if "AWS_ENDPOINT_URL" in os.environ:
        from trainer_sdk.checkpoint.storage import objects

        objects._PART_BYTES = PIECE_BYTES


if __name__ == "__main__":
    write_small_pieces()
    main()
