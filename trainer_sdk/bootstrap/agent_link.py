"""A rank's link to its agent: the page that it writes, and datagrams that never block."""

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
        """Accepts a datagram or refuses it at once."""

        def send(self, octets: bytes, /) -> int: ...


_LONGEST_SOCKET_PATH = 107

bootstrap_link: "AgentLink | None" = None
"""The link that the bootstrap has opened for this process."""


class AgentLink:
    """The link of a rank. It never raises; without an agent it writes to private memory."""

    def __init__(self, environ: "Mapping[str, str]") -> None:
        self.words = private_page()
        self.attached = False
        self.starts_ranks = False
        """Its agent has started this rank, and starts it again; others only watch."""
        self.has_session = False
        """The script has opened a session, and may count its own steps."""
        self.resumed_at = 0
        """The step after which the training goes on, if the script has reported it."""
        self.folder = environ.get(layout.FOLDER_VARIABLE, "")
        self._socket: DatagramSocket | None = None
        self._round = self._rank = 0
        self._open(environ)

    def up(self) -> None:
        """Report that the script begins."""
        self.words[layout.PHASE] = layout.PHASE_SCRIPT
        self.words[layout.SCRIPT_NS] = self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.send("up", f'"pid":{os.getpid()}')

    def first_step(self, step: int | None = None) -> None:
        """Report that the first step is finished; by default it is the last one."""
        self.words[layout.FIRST_STEP_NS] = monotonic_ns()
        self.send("stepped", f'"step":{self.words[layout.STEP] if step is None else step}')

    def ended(self, code: int, *, error: bool = False, is_sure: bool = True) -> None:
        """Report that the script has ended; `is_sure` if it does so with this very code."""
        self.words[layout.EXIT_CODE] = 1 + code if is_sure else 0
        self.words[layout.PHASE] = layout.PHASE_ENDED
        self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.send("ended", f'"code":{code},"error":{"true" if error else "false"}')

    def send(self, kind: str, fields: str) -> None:
        """Send a datagram whose fields are JSON already; if that fails, it is counted."""
        if self._socket is None:
            return
        try:
            self._socket.send(self.line(kind, fields).encode())
        except OSError:
            self.words[layout.DROPPED] += 1

    def line(self, kind: str, fields: str) -> str:
        """A datagram of this rank."""
        return f'{{"type":"{kind}",{fields},"round":{self._round},"rank":{self._rank}}}'

    def fileno(self) -> int:
        """The socket, for a process that may speak for the rank; -1 without an agent's."""
        fileno = getattr(self._socket, "fileno", None)
        return -1 if fileno is None else int(fileno())

    def begin_round(self, environ: "Mapping[str, str]") -> None:
        """Go on as a rank of this environment, on its page; KeyError, OSError or ValueError."""
        number, rank = int(environ.get(layout.ROUND_VARIABLE, "0")), int(environ["RANK"])
        words = map_page(environ[layout.PAGE_VARIABLE])
        wire = connect_to(environ[layout.SOCKET_VARIABLE])
        for word in (layout.DEFERRED, layout.TOTAL_STEPS, layout.WARMUP, layout.SURVIVES):
            words[word] = self.words[word]
        former, self._socket = self._socket, None
        self.folder = environ.get(layout.FOLDER_VARIABLE, "")
        self.attach(words, wire, number, rank)
        if isinstance(former, _socket.socket):
            former.close()

    def _open(self, environ: "Mapping[str, str]") -> None:
        try:
            number, rank = int(environ.get(layout.ROUND_VARIABLE, "0")), int(environ["RANK"])
            words = map_page(environ[layout.PAGE_VARIABLE])
            wire = connect_to(environ[layout.SOCKET_VARIABLE])
        except (KeyError, OSError, ValueError):
            return  # no agent, or it is gone: the script runs all the same
        # nothing is copied: another link of this process may have written to the page before
        self.attach(words, wire, number, rank)
        self.starts_ranks = True
        # A process that the script forks is not the rank, and must not speak for it.
        os.register_at_fork(after_in_child=self.detach)

    def attach(
        self, words: "memoryview[int]", wire: "DatagramSocket", number: int, rank: int
    ) -> None:
        """Write to this page and this socket, as this rank of this round."""
        self.words, self._socket = words, wire
        self._round, self._rank = number, rank
        self.attached = True
        self.words[layout.PID] = os.getpid()
        self.words[layout.ROUND] = self._round
        self.words[layout.RANK] = self._rank
        self.words[layout.PHASE] = layout.PHASE_STARTING
        self.words[layout.PROGRESS_NS] = monotonic_ns()
        self.words[layout.MAGIC_AT] = layout.MAGIC  # written last: the reader waits for it

    def detach(self) -> None:
        """Write to private memory from now on, and send nothing."""
        self.words = private_page()
        self.attached = self.starts_ranks = False
        self._socket = None


def private_page() -> "memoryview[int]":
    """Memory in the layout of a page that no other process sees."""
    return memoryview(bytearray(layout.PAGE_BYTES)).cast("q")


def map_page(path: str) -> "memoryview[int]":
    """The page at this path, mapped."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(descriptor, layout.PAGE_BYTES)).cast("q")
    finally:
        os.close(descriptor)


def connect_to(path: str) -> _socket.socket:
    """A socket that sends datagrams to this path; OSError if nobody listens."""
    opened = _socket.socket(
        _socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
    )
    try:
        with ShortPath(path) as short:
            opened.connect(short)
    except OSError:
        opened.close()
        raise
    return opened


class ShortPath:
    """Gives a path of any length a short name, which fits into a unix socket's address."""

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
