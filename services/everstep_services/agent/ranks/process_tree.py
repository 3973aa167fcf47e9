"""The processes below another, and how to kill them without touching any other."""

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer_sdk import layout

_COMMAND_BYTES = 120
_PASSES = 10
_CLEANED_WITHIN_S = 2.0
_LOOK_S = 0.01
_PPID, _SESSION = 1, 3  # counted after the command's name in /proc/PID/stat


def descendants(
    root: int, without: Collection[int] = (), *, spared: Collection[int] = ()
) -> dict[int, int]:
    """All processes below `root` with their parents, except those in `without`.

    Processes below those of `without` are included, those below the `spared` are not.
    """
    parents: dict[int, int] = {}
    todo = [root]
    while todo:
        parent = todo.pop()
        for child in children(parent):
            if child not in parents and child not in spared:
                parents[child] = parent
                todo.append(child)
    return {pid: parent for pid, parent in parents.items() if pid not in without}


def children(pid: int) -> list[int]:
    """The children of `pid`, zombies too; none if it is gone."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return _children_by_search(pid)  # a kernel without CONFIG_PROC_CHILDREN
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                pids.extend(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        return pids
    return pids


def _children_by_search(pid: int) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    parents = ((child, stat(child)) for child in pids)
    return [child for child, fields in parents if fields and int(fields[_PPID]) == pid]


def kill(pid: int, parent: int) -> bool:
    """Kill a process if it is still the child of that parent, or was adopted since.

    Its number may have been given to another process meanwhile: the parent is checked again
    through a handle that stays bound to one process.
    """
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        fields = stat(pid)
        if not fields or int(fields[_PPID]) not in (parent, os.getpid()):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    else:
        return True
    finally:
        os.close(handle)


def kill_tree(root: int) -> set[int]:
    """Kill a process, its group, and all below it in other groups; return those below it.

    Where this process adopts orphans, those become its children once `root` has ended, and it must
    reap them (`has_reaped`).
    """
    below: set[int] = set()
    for _ in range(_PASSES):  # a process may fork while the others are looked at
        fresh = descendants(root, without=below)
        if not fresh:
            break
        for pid, parent in fresh.items():
            kill(pid, parent)
        below |= fresh.keys()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)
    return below


def has_reaped(pids: Collection[int]) -> bool:
    """Reap those of these processes that are children of this one; False while one still dies."""
    are_gone = True
    for pid in pids:
        with suppress(ChildProcessError):
            are_gone &= os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    return are_gone


def clean_up() -> None:
    """Kill and reap everything below this process, in any session; it must be a subreaper."""
    until = time.monotonic() + _CLEANED_WITHIN_S
    while left := descendants(os.getpid()):
        for pid, parent in left.items():
            kill(pid, parent)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() >= until:
            return
        time.sleep(_LOOK_S)


def command(pid: int) -> str:
    """The command of a process for a person; its name if the command is hidden."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(_COMMAND_BYTES).rstrip(b"\0").split(b"\0")
        with open(f"/proc/{pid}/comm", "rb") as file:
            text = b" ".join(words).strip() or file.read().strip()
    except OSError:
        return "(gone)"
    return "".join(c if c.isprintable() else "?" for c in text.decode(errors="replace"))


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name; none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def session(pid: int) -> int:
    """The session of a process; 0 if it is gone."""
    fields = stat(pid)
    return int(fields[_SESSION]) if fields else 0


def environ(pid: int) -> dict[str, str]:
    """The environment with which a process was started; nothing if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return _parse(file.read())
    except OSError:
        return {}


def _parse(environ: bytes) -> dict[str, str]:
    pairs = (item.partition(b"=") for item in environ.split(b"\0"))
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def catches(pid: int, number: int) -> bool:
    """Whether a process has its own handler for a signal."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def kill_instance(instance: str, others: Collection[int] = ()) -> int:
    """Kill the processes that an agent's killed warden has left; return their number.

    Its orphans have become children of the agent, and are known by their session: processes
    that the agent itself has started share its session, or existed before (`others`). The tag
    finds all others further below.
    """
    killed, own = 0, os.getsid(0)
    for pid in set(children(os.getpid())).difference(others):
        if session(pid) not in {0, own}:
            for below, parent in descendants(pid).items():
                killed += kill(below, parent)
            killed += kill(pid, os.getpid())
            os.waitpid(pid, 0)  # nobody else reaps processes that we have not started
    return killed + _kill_tagged(lambda tags: tags.get(layout.INSTANCE_VARIABLE) == instance)


def kill_leftovers() -> int:
    """Kill ranks whose agent and warden are both gone; return their number.

    Agent and warden hold one lock together, whose path is in their ranks' environment. A rank
    whose lock is held, or cannot be found, is left alone.
    """
    return _kill_tagged(lambda tags: is_free(tags.get(layout.LOCK_VARIABLE, "")))


def _kill_tagged(wanted: Callable[[dict[str, str]], bool]) -> int:
    killed = 0
    for pid, tags in _tagged():
        if not wanted(tags):
            continue
        for below, parent in descendants(pid).items():
            killed += kill(below, parent)
        fields = stat(pid)
        if fields:
            killed += kill(pid, int(fields[_PPID]))
    return killed


def _tagged() -> Iterator[tuple[int, dict[str, str]]]:
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != os.getuid():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                octets = file.read()
        except OSError:
            continue
        if layout.INSTANCE_VARIABLE.encode() in octets:
            yield int(name), _parse(octets)


@contextmanager
def alone_in(base: Path) -> Iterator[None]:
    """Let one agent at a time make or remove a folder, so that no folder is seen without its lock.

    An agent that is killed meanwhile releases the others.
    """
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_free(path: str) -> bool:
    """Nobody holds this lock: its agent and its warden are gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """From now on, this process adopts every process below it that loses its parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
