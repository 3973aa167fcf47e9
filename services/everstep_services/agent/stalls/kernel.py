"""What the kernel says about a process that makes no progress."""

import os
from dataclasses import dataclass
from pathlib import Path

_MEANINGS = {
    "T": "it is stopped, as by SIGSTOP",
    "t": "a debugger holds it",
    "D": "it waits inside the kernel, as for a disk or a device",
    "Z": "it has exited, and nobody has noticed",
    "R": "it computes, or holds the interpreter's lock",
}
_WAITS = {
    "futex": "it waits for a lock",
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


@dataclass(frozen=True, slots=True)
class ProcessState:
    """How a process is: the kernel's letter, and in words."""

    letter: str
    text: str


def state_of(pid: int, root: Path = Path("/proc")) -> ProcessState:
    """How the main thread of a process is; empty where nothing can be read."""
    try:
        letter = (root / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ProcessState("", "")
    if letter in _MEANINGS and letter != "D":
        return ProcessState(letter, _MEANINGS[letter])
    channel = _channel(root / str(pid) / "wchan")
    meaning = next((text for part, text in _WAITS.items() if part in channel), "")
    known = meaning or _MEANINGS.get(letter, "")
    text = f"{known} ({channel})" if channel and known else known or channel
    return ProcessState(letter, text)


def threads_of(pid: int) -> frozenset[int] | None:
    """The threads of a process; None where they cannot be read."""
    try:
        return frozenset(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except (OSError, ValueError):
        return None


def _channel(path: Path) -> str:
    try:
        channel = path.read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel
