"""Runs a command as another user of this host, who may read this interpreter and these sources.

    as_user.py NUMBER FOLDER [FOLDER …] -- COMMAND [ARGUMENT …]

A folder below one that only root may enter, such as root's home, is shown to the command alone, at
its own place, in a namespace of its own. All else is the host's, and the user gets nothing more.
"""

import ctypes
import os
import stat
import sys
from pathlib import Path

_NEW_NAMESPACE = 0x00020000
_BIND, _WITH_ALL_BELOW, _PRIVATE = 0x1000, 0x4000, 0x40000


def main(number: int, folders: list[Path], command: list[str]) -> None:
    _open(folders)
    os.setgroups([])
    os.setgid(number)
    os.setuid(number)
    os.execvp(command[0], command)


def _open(folders: list[Path]) -> None:
    hidden = {folder: place for folder in folders if (place := _closed_above(folder)) is not None}
    if not hidden:
        return
    _done(_C.unshare(_NEW_NAMESPACE))
    _mount("none", Path("/"), None, _PRIVATE | _WITH_ALL_BELOW)
    kept = {folder: os.open(folder, os.O_PATH) for folder in hidden}
    for place in set(hidden.values()):
        _mount("tmpfs", place, "tmpfs", 0, b"mode=755")
    for folder, descriptor in sorted(kept.items()):  # so that one within another comes later
        folder.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", folder, None, _BIND | _WITH_ALL_BELOW)
        os.close(descriptor)


def _closed_above(folder: Path) -> Path | None:
    """The outermost folder above that others may not pass."""
    above = reversed(folder.parents)
    return next((place for place in above if not place.stat().st_mode & stat.S_IXOTH), None)


def _mount(
    what: str, place: Path, kind: str | None, flags: int, options: bytes | None = None
) -> None:
    named = None if kind is None else kind.encode()
    _done(_C.mount(what.encode(), os.fsencode(place), named, ctypes.c_ulong(flags), options))


def _done(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_C = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    os.umask(0o022)
    rest = sys.argv[2:]
    end = rest.index("--")
    main(int(sys.argv[1]), [Path(one) for one in rest[:end]], rest[end + 1 :])
