"""The steps that make a forked process a rank: session, signals, streams, death with its parent."""

import os
import signal
import sys
import time

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
    import ctypes  # a cold rank must not load it

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def refuse(text: str) -> None:
    """Print on the rank's stderr why it cannot run, and exit with the code of a shell."""
    sys.stderr.write(f"everstep: {text}\n")
    sys.stderr.flush()
    os._exit(_NOT_OURS)
