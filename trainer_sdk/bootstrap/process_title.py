"""Shows `ps` and `pkill -f` the user's command in a forked rank, instead of the forge's."""

import ctypes
import struct

from trainer_sdk.wire import RankCommand

PADDING = "-" * 1024
"""The forge's last argument: a title cannot be longer than the original arguments."""

_ARG_START = 45  # counted after the command's name in /proc/PID/stat
_ARG_END = 46
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_FIELDS = (23, 24, 42, 43, 44, -1, 25, 45, 46, 47, 48)
"""The fields of /proc/PID/stat that the kernel needs; the end of the heap (-1) is not there."""
_HEAP_END, _ARGUMENTS = 5, 7

_kept: "ctypes.Array[ctypes.c_char] | None" = None
"""The memory from which the kernel reads the title."""


def show(command: RankCommand, python: str) -> None:
    """Show this command as the arguments of this process."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    size = end - start
    if start == 0 or size < len(PADDING):
        return  # the process was started without the padding: there is no room for a title
    module = ["-m"] if command.kind == "module" else []
    words = [python, *module, command.target, *command.arguments]
    text = "\0".join(words).encode(errors="surrogateescape")
    if not _point_to(text + b"\0", fields):
        ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


def _point_to(text: bytes, fields: list[str]) -> bool:
    """Make the kernel read the arguments from `text`; False if the kernel does not support that."""
    global _kept  # noqa: PLW0603  as long as the process
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    kept = ctypes.create_string_buffer(text, len(text))
    words = [int(fields[index]) for index in _FIELDS]
    words[_HEAP_END] = libc.sbrk(ctypes.c_ssize_t(0)) or 0
    words[_ARGUMENTS] = ctypes.addressof(kept)
    words[_ARGUMENTS + 1] = words[_ARGUMENTS] + len(text)
    no_auxv, same_program = (0, 0), 0xFFFFFFFF
    layout = struct.pack("=11QQII", *words, *no_auxv, same_program)
    if libc.prctl(
        _PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), ctypes.c_ulong(0)
    ):
        return False
    _kept = kept
    return True
