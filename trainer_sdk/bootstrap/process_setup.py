"""The steps that make a forked process a rank.

They concern its session, signals, streams, death with its parent, the title that `ps` shows, and
the numbers of threads that a fresh process would have.
"""

import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping

from trainer_sdk.wire import RankCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_NOT_OURS = 127


def become_session(*, stdout: str, stderr: str, cwd: str, held: "Iterable[int]" = ()) -> None:
    """Leave the parent's session, signals, output and working directory; stdin stays the agent's.

    `held` are the signals that stay blocked until the rank unblocks them itself. OSError if a file
    or the folder cannot be opened; changes before the error stay.
    """
    os.setsid()
    restore_signals(held)
    redirect(stderr, 2, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    redirect(stdout, 1, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.chdir(cwd)


def restore_signals(held: "Iterable[int]" = ()) -> None:
    """Set every signal to its default and block only `held`, as after exec from a plain shell."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, held)


def python_signals() -> None:
    """Set the handlers that a fresh Python sets."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def redirect(path: str, descriptor: int, flags: int) -> None:
    """Open a file as a standard stream."""
    opened = os.open(path, flags | os.O_CLOEXEC, 0o640)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
        return
    os.dup2(opened, descriptor, inheritable=True)
    os.close(opened)


def die_with(parent: int, *, born_of: int) -> None:
    """Have the kernel kill this process when `parent` dies; leave at once if it has.

    A process that `born_of` has forked waits here until `born_of` has exited and `parent`, the
    nearest subreaper, has become its parent.
    """
    while os.getppid() == born_of != parent:
        time.sleep(0.0005)  # the kernel notifies the new parent only, not the child
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(_NOT_OURS)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def refuse(text: str) -> None:
    """Print on the rank's stderr why it cannot run, and exit with the code of a shell."""
    sys.stderr.write(f"everstep: {text}\n")
    sys.stderr.flush()
    os._exit(_NOT_OURS)


TITLE_PADDING = "-" * 1024
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


def show_title(command: RankCommand, python: str) -> None:
    """Show this command as the arguments of this process."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    size = end - start
    if start == 0 or size < len(TITLE_PADDING):
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


_PREFIXES = ("", "scipy_")
_SUFFIXES = ("", "64_")


def restore_threads(forge: Mapping[str, str], rank: Mapping[str, str]) -> None:
    """Set the rank's own values in libraries, which have read the forge's variables."""
    torch = sys.modules.get("torch")
    wanted = _number(rank, "OMP_NUM_THREADS")
    if torch is not None and wanted and forge.get("OMP_NUM_THREADS") != rank["OMP_NUM_THREADS"]:
        torch.set_num_threads(wanted)
    blas = (
        _number(rank, "OPENBLAS_NUM_THREADS")
        or _number(rank, "GOTO_NUM_THREADS")
        or wanted
        or len(os.sched_getaffinity(0))
    )
    if blas > 1:  # the forge has 1
        for path in _openblas():
            _set(path, blas)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "").partition(",")[0]
    return int(value) if value.isdecimal() else 0


def _openblas() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in file if "openblas" in line}
    return {path for path in paths if path.startswith("/")}


def _set(path: str, number: int) -> None:
    library = ctypes.CDLL(path)
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if function is not None:
                function(number)
                return
