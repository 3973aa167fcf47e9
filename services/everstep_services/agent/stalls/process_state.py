"""The kernel's view of a process that makes no progress."""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_UNINTERRUPTIBLE = "D"
_MEANINGS = {
    "T": "it is stopped, as by SIGSTOP",
    "t": "a debugger holds it",
    _UNINTERRUPTIBLE: "it waits for a disk or a driver",
    "Z": "zombie: exited, not yet reaped",
    "R": "it computes, or holds the interpreter's lock",
}
_STOPPED = frozenset({"T", "t"})
_OWN_REASONS = _STOPPED | {_UNINTERRUPTIBLE, "Z", "X"}
_LOCK = "it waits for a lock"
_WAITS = {
    "futex": _LOCK,
    "poll": "it waits for a socket or a file",
    "epoll": "it waits for a socket or a file",
    "select": "it waits for a socket or a file",
    "recv": "it waits for the network",
    "skb": "it waits for the network",
    "tcp": "it waits for the network",
    "inet": "it waits for the network",
    "nanosleep": "it sleeps",
    "hrtimer": "it sleeps",
    "pipe": "it waits for a pipe",
    "do_wait": "it waits for a child process",
    "nfs": "it waits for a network file system",
    "lustre": "it waits for a network file system",
}
_UNINTERRUPTIBLE_WAITS = {
    "nfs": "it waits for a network file system",
    "lustre": "it waits for a network file system",
    "vfork": "it waits for a child that starts a program",
    "kernel_clone": "it waits for a child that starts a program",
}


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of a process: the kernel's letter, and words."""

    letter: str
    text: str
    is_waiting_for_ranks: bool | None = None
    """It waits for other ranks: one of them may be the reason of the stall. None if unknown."""

    @property
    def is_doubtful(self) -> bool:
        """The words say that the cause may be another one."""
        return bool(self.text) and self.is_waiting_for_ranks is not False

    @property
    def is_stopped(self) -> bool:
        """A signal or a debugger holds it: whatever other ranks do, it cannot move."""
        return self.letter in _STOPPED

    @property
    def is_behind_lock(self) -> bool:
        """It waits for another thread of its process."""
        return self.text.startswith(_LOCK)

    @property
    def is_own_reason(self) -> bool:
        """The state itself explains the stall, whatever the interpreter does."""
        return self.letter in _OWN_REASONS


def state_of(pid: int, root: Path = PROC) -> ProcessState:
    """The state of a process's main thread; empty where nothing can be read."""
    try:
        letter = (root / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ProcessState("", "")
    if letter in _MEANINGS and letter != _UNINTERRUPTIBLE:
        return ProcessState(letter, _MEANINGS[letter])
    channel = _channel(root / str(pid) / "wchan")
    if letter == _UNINTERRUPTIBLE:
        meaning = _meaning(channel, _UNINTERRUPTIBLE_WAITS) or _MEANINGS[letter]
        return ProcessState(letter, f"{meaning} ({', '.join(filter(None, (letter, channel)))})")
    meaning = _meaning(channel, _WAITS)
    text = f"{meaning} ({channel})" if meaning else channel
    return ProcessState(letter, text)


def threads_of(pid: int, root: Path = PROC) -> frozenset[int] | None:
    """The threads of a process; None where they cannot be read."""
    try:
        return frozenset(int(name) for name in os.listdir(root / str(pid) / "task"))
    except (OSError, ValueError):
        return None


def _meaning(channel: str, waits: dict[str, str]) -> str:
    return next((text for part, text in waits.items() if part in channel), "")


def _channel(path: Path) -> str:
    try:
        channel = path.read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel
