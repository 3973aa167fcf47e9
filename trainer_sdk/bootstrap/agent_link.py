"""A rank's ways to its agent: the page that it writes, and datagrams that nobody waits for."""

import _socket
import mmap
import os
from time import monotonic_ns

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class DatagramSocket(Protocol):
        """Takes a datagram or refuses it at once."""

        def send(self, octets: bytes, /) -> int: ...


_LONGEST_SOCKET_PATH = 107

bootstrap_link: "AgentLink | None" = None
"""The one that the bootstrap has opened for this process."""


class AgentLink:
    """Works without an agent, too: then it writes to memory of its own. It never raises."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        self.words = private_page()
        self.attached = False
        self.folder = environ.get(layout.FOLDER_VARIABLE, "")
        self._socket: DatagramSocket | None = None
        self._round = self._rank = 0
        self._open(environ)

    def up(self) -> None:
        """Say that the script begins."""
        self.words[layout.PHASE] = layout.PHASE_SCRIPT
        self.words[layout.SCRIPT_NS] = self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.say("up", f'"pid":{os.getpid()}')

    def first_step(self) -> None:
        """Say that the first step is done."""
        self.words[layout.FIRST_STEP_NS] = monotonic_ns()
        self.say("stepped", f'"step":{self.words[layout.STEP]}')

    def ended(self, code: int, *, error: bool = False) -> None:
        """Say that the script is over."""
        self.words[layout.PHASE] = layout.PHASE_ENDED
        self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.say("ended", f'"code":{code},"error":{"true" if error else "false"}')

    def say(self, kind: str, fields: str) -> None:
        """Send a datagram whose fields are JSON already; one that cannot be sent is counted."""
        if self._socket is None:
            return
        line = f'{{"type":"{kind}",{fields},"round":{self._round},"rank":{self._rank}}}'
        try:
            self._socket.send(line.encode())
        except OSError:
            self.words[layout.DROPPED] += 1

    def _open(self, environ: "Mapping[str, str]") -> None:
        try:
            number, rank = int(environ.get(layout.ROUND_VARIABLE, "0")), int(environ["RANK"])
            words = map_page(environ[layout.PAGE_VARIABLE])
            wire = connect_to(environ[layout.SOCKET_VARIABLE])
        except (KeyError, OSError, ValueError):
            return  # no agent, or one that is gone: the script runs all the same
        self.attach(words, wire, number, rank)
        # A process that the script forks is not the rank, and must not speak for it.
        os.register_at_fork(after_in_child=self.detach)

    def attach(
        self, words: "memoryview[int]", wire: "DatagramSocket", number: int, rank: int
    ) -> None:
        """Speak for this rank of this round."""
        self.words, self._socket = words, wire
        self._round, self._rank = number, rank
        self.attached = True
        self.words[layout.PID] = os.getpid()
        self.words[layout.ROUND] = self._round
        self.words[layout.RANK] = self._rank
        self.words[layout.PHASE] = layout.PHASE_STARTING
        self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.words[layout.MAGIC_AT] = layout.MAGIC  # the last: the reader waits for it

    def detach(self) -> None:
        """Write to memory of its own from now on, and say nothing."""
        self.words = private_page()
        self.attached = False
        self._socket = None


def private_page() -> "memoryview[int]":
    """Memory of this process alone, in the form of a page."""
    return memoryview(bytearray(layout.PAGE_BYTES)).cast("q")


def map_page(path: str) -> "memoryview[int]":
    """The page that is there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(descriptor, layout.PAGE_BYTES)).cast("q")
    finally:
        os.close(descriptor)


def connect_to(path: str) -> _socket.socket:
    """A socket whose datagrams go there; OSError when nobody listens."""
    made = _socket.socket(
        _socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
    )
    try:
        with ShortPath(path) as short:
            made.connect(short)
    except OSError:
        made.close()
        raise
    return made


class ShortPath:
    """A name that fits into a unix socket's address, for a path that may not."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _LONGEST_SOCKET_PATH:
            return self._path
        folder, name = os.path.split(self._path)
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{name}"

    def __exit__(self, *_: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)
