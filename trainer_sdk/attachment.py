"""Attach mode: another launcher has started this rank, and an agent of ours only watches it.

The rank makes its page itself, in the folder where the agent looks for it. The first rank of a node
starts the agent if none runs, and a rank that ends before that starts it too. No rank waits for the
agent.
"""

import atexit
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.torch_hooks import serve_torch
from trainer_sdk.launchers import LaunchedRank, is_worker, job_of
from trainer_sdk.page import BadPageError, make_page, view_page
from trainer_sdk.sdk_log import warn_once

AGENT = "everstep_services.cli.attached"
AGENT_LOCK = "agent.lock"
SOCKET = "socket"
LOG = "agent.log"
PAGE = "page"
SAY_AT = 3
"""The agent's descriptor of the rank's stderr, on which it may print until its first step."""
LOCK_AT = 4
"""The agent's descriptor of its lock, which is held from before the agent begins."""
_ASIDE = 5
_SHELL = '"$@" &'


class AgentSocket:
    """The agent's socket, which may not exist yet, or may belong to a later agent."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: links.DatagramSocket | None = None

    def send(self, octets: bytes, /) -> int:
        """Send at once; OSError if nobody listens or the receiver has no room."""
        if self._socket is None:
            self._socket = links.connect_to(self._path)
        try:
            return self._socket.send(octets)
        except ConnectionError:
            self._socket = None
            raise


def attach(environ: Mapping[str, str], place: LaunchedRank, link: AgentLink) -> None:
    """Have an agent watch the rank; if that fails, one warning gives the reason."""
    try:
        _attach(environ, place, link)
    except Exception as error:  # noqa: BLE001 - the training goes on without an agent
        if not place.local_rank:
            warn_once(f"this rank is not watched: {error}; EVERSTEP_ATTACH=off does not try")


def folder_for(environ: Mapping[str, str], job: str) -> str:
    """The folder of a job's ranks on this node and their agent; in memory if possible."""
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    if chosen and os.path.isdir(chosen):
        base = os.path.join(chosen, "everstep")
    else:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # noqa: S108  ours, 0700
        base = os.path.join(root, f"everstep-{os.getuid()}")
    return os.path.join(base, f"attached-{job}")


def is_held(path: str) -> bool:
    """Whether a process holds this lock exclusively."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _attach(environ: Mapping[str, str], place: LaunchedRank, link: AgentLink) -> None:
    folder = folder_for(environ, job_of(environ, place))
    own = os.path.join(folder, str(place.round), f"{place.rank}-{place.local_rank}")
    if is_worker(environ, place) or _is_taken(os.path.join(own, PAGE)):
        return
    for path in (os.path.dirname(folder), folder, os.path.dirname(own), own):
        private_folder(path)
    holds = _held(folder)
    _open_page(own, place, link, AgentSocket(os.path.join(folder, SOCKET)))
    os.register_at_fork(after_in_child=link.detach)
    atexit.register(_leave, link, folder, holds, environ)
    serve_torch(own)
    link.up()
    if not place.local_rank:
        _start_agent(folder, environ)


def _open_page(own: str, place: LaunchedRank, link: AgentLink, agent: AgentSocket) -> None:
    """Make the page under a temporary name: the agent never reads a partial or old page."""
    path = os.path.join(own, PAGE)
    temporary = f"{path}.{os.getpid()}"
    make_page(temporary).close()
    link.attach(links.map_page(temporary), agent, place.round, place.rank)
    link.folder = own
    os.replace(temporary, path)


def _is_taken(path: str) -> bool:
    """Whether another live process is this rank, and has started this process."""
    try:
        view = view_page(path)
    except (OSError, ValueError):
        return False
    try:
        reading = view.read()
    except BadPageError:
        return False
    finally:
        view.close()
    if reading is None or reading.pid == os.getpid():
        return False
    return os.path.exists(f"/proc/{reading.pid}")


def private_folder(path: str) -> None:
    """Make a folder that only this user can read; PermissionError if another user has it."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a folder of this user: remove it")
    if about.st_mode & 0o077:
        os.chmod(path, 0o700)


def _held(folder: str) -> int:
    """Lock the folder, so that nobody removes it as abandoned while this process lives."""
    base = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(base, fcntl.LOCK_EX)  # so that nobody looks before the new lock is held
        lock = os.path.join(folder, layout.LOCK_FILE)
        holds = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(holds, fcntl.LOCK_SH)
    finally:
        os.close(base)
    return holds


def _start_agent(folder: str, environ: Mapping[str, str]) -> None:
    """Start an agent, unless one runs."""
    lock = os.open(os.path.join(folder, AGENT_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _spawn_agent(folder, environ, lock)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _spawn_agent(folder: str, environ: Mapping[str, str], lock: int) -> None:
    """Start the agent in its own session, through a shell: the script gets no child to reap."""
    log = os.path.join(folder, LOG)
    agent = [sys.executable, "-P", "-m", AGENT, folder, *sys.argv]
    shell = os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", _SHELL, "sh", *agent],
        environ,
        file_actions=(
            (os.POSIX_SPAWN_DUP2, lock, _ASIDE),
            (os.POSIX_SPAWN_DUP2, 2, SAY_AT),
            (os.POSIX_SPAWN_DUP2, _ASIDE, LOCK_AT),
            (os.POSIX_SPAWN_CLOSE, _ASIDE),
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ),
        setsid=True,
        setsigmask=(),
    )
    with suppress(ChildProcessError):
        os.waitpid(shell, 0)


def _leave(link: AgentLink, folder: str, holds: int, environ: Mapping[str, str]) -> None:
    """Report how the interpreter ends, and remove the folder if nobody needs it."""
    if not link.attached:
        return  # this process is a fork of the rank
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        from trainer_sdk.bootstrap import exception_record  # most ranks need none of it

        with suppress(OSError):
            exception_record.write(error, {}, link.folder)
    failed = error is not None
    link.ended(int(failed), error=failed, is_sure=failed)  # it may have called sys.exit(3)
    if not os.path.exists(os.path.join(folder, LOG)):
        with suppress(FileNotFoundError):  # an agent has removed it, because it found no bus
            _start_agent(folder, environ)  # no first rank has started one: report this rank
    if is_held(os.path.join(folder, AGENT_LOCK)):
        return  # the agent still reads the page
    with suppress(OSError):
        if os.path.samestat(os.fstat(holds), os.stat(os.path.join(folder, layout.LOCK_FILE))):
            fcntl.flock(holds, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while other ranks are here
            shutil.rmtree(folder, ignore_errors=True)
