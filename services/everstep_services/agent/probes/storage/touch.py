"""A program that touches one folder, step by step, and may hang in the kernel for ever.

    python -I -S touch.py FOLDER look|write

It prints the name of each step before it takes it, so that a reader knows where it hangs. Stdlib
only, and started without site-packages: it must start where storage is the trouble.
"""

import contextlib
import errno
import os
import sys

LOOKED_AT = 100
SIZE = 1 << 16


def touch(folder: str, *, write: bool) -> None:
    """Take every step. Raises OSError at the first that fails."""
    _step("stat")
    os.stat(folder)
    _step("list")
    with os.scandir(folder) as entries:
        for _, _entry in zip(range(LOOKED_AT), entries, strict=False):
            pass
    if write:
        _write(os.path.join(folder, f".everstep-check-{os.uname().nodename}-{os.getpid()}"))


def _write(path: str) -> None:
    wanted = os.urandom(SIZE)
    _step("make a file")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _step("write")
        os.write(descriptor, wanted)
        _step("fsync")
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        _step("read")
        if os.pread(descriptor, SIZE, 0) != wanted:
            raise OSError(errno.EIO, "what was read is not what was written")
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _step(name: str) -> None:
    sys.stdout.write(f"{name}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        touch(sys.argv[1], write=sys.argv[2] == "write")
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "EIO")
        _step(f"{code} {error.strerror}")
        sys.exit(1)
