"""Standard streams of a rank: the training goes on when the disk of its output is full.

The output of a rank is a file on the node. Under another launcher it would be a pipe or a terminal,
which is never full; so a script may not die here of a `print`.
"""

import errno
import io
import sys

TYPE_CHECKING = False  # `typing` would cost every rank a third of the whole bootstrap
if TYPE_CHECKING:
    from typing import TextIO

    from _typeshed import ReadableBuffer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LastingOutput(io.FileIO):
    """A file that drops what its disk has no room for, and tells how much once there is room."""

    _lost = 0

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write as much as fits now; what does not fit counts as written."""
        try:
            if self._lost:
                super().write(
                    b"\n[everstep: the disk was full: %d bytes of output are lost]\n" % self._lost
                )
                self._lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            size = memoryview(data).nbytes
            self._lost += size
            return size


def make_streams_last(*, at_once: bool) -> None:
    """Give the interpreter standard streams that outlive a full disk; foreign ones stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            lasting = _lasting(stream, at_once=at_once)
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)


def _lasting(stream: io.TextIOWrapper, *, at_once: bool) -> "TextIO":
    raw = LastingOutput(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name  # `<stdout>`, as scripts may ask
    lasting = io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        # Python buffers files in blocks: a killed rank would lose its last lines.
        line_buffering=True,
        write_through=at_once,
    )
    lasting.mode = stream.mode  # type: ignore[misc]  # as the interpreter itself does
    return lasting
