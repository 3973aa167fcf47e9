"""Attach mode: another launcher has started this rank, and an agent of ours only watches it.

The rank makes its page itself, where the agent looks for it. The first rank of a node starts the
agent if none runs, and so does one that leaves before that; neither waits for it.
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
"""The descriptor by which an agent may speak on the rank's stderr, up to its first step."""
LOCK_AT = 4
"""The one by which it holds its lock, from before it has begun."""
_ASIDE = 5
_SHELL = '"$@" &'


class AgentSocket:
    """The agent's socket, which may not be there yet, or be another one by now."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._wire: links.DatagramSocket | None = None

    def send(self, octets: bytes, /) -> int:
        """Send at once; OSError when nobody listens, or has no room."""
        if self._wire is None:
            self._wire = links.connect_to(self._path)
        try:
            return self._wire.send(octets)
        except ConnectionError:
            self._wire = None
            raise


def attach(environ: Mapping[str, str], place: LaunchedRank, link: AgentLink) -> None:
    """Have the rank watched. Where that cannot be, a line says why, and nothing changes."""
    try:
        _attach(environ, place, link)
    except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on without us
        if not place.local_rank:
            warn_once(f"this rank is not watched: {error}; EVERSTEP_ATTACH=off does not try")


def folder_for(environ: Mapping[str, str], job: str) -> str:
    """Where ranks of a job on this node and their agent meet; in memory where there is some."""
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    if chosen and os.path.isdir(chosen):
        base = os.path.join(chosen, "everstep")
    else:
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # noqa: S108  ours, 0700
        base = os.path.join(root, f"everstep-{os.getuid()}")
    return os.path.join(base, f"attached-{job}")


def is_held(path: str) -> bool:
    """Somebody holds this lock exclusively."""
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
        _private(path)
    holds = _held(folder)
    _open_page(own, place, link, AgentSocket(os.path.join(folder, SOCKET)))
    os.register_at_fork(after_in_child=link.detach)
    atexit.register(_leave, link, folder, holds, environ)
    serve_torch(own)
    link.up()
    if not place.local_rank:
        _start_agent(folder, environ)


def _open_page(own: str, place: LaunchedRank, link: AgentLink, door: AgentSocket) -> None:
    """Under another name first: what the agent finds is whole, and an old page is never read."""
    path = os.path.join(own, PAGE)
    beside = f"{path}.{os.getpid()}"
    make_page(beside).close()
    link.attach(links.map_page(beside), door, place.round, place.rank)
    link.folder = own
    os.replace(beside, path)


def _is_taken(path: str) -> bool:
    """Another process that lives is this rank; this one was started by it."""
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


def _private(path: str) -> None:
    """A folder of ours alone."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    about = os.lstat(path)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a folder of this user: remove it")
    if about.st_mode & 0o077:
        os.chmod(path, 0o700)


def _held(folder: str) -> int:
    """Its lock: as long as we live, nobody takes the folder for left behind."""
    base = os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(base, fcntl.LOCK_EX)  # nobody looks between the making of the lock and its hold
        lock = os.path.join(folder, layout.LOCK_FILE)
        holds = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(holds, fcntl.LOCK_SH)
    finally:
        os.close(base)
    return holds


def _start_agent(folder: str, environ: Mapping[str, str]) -> None:
    """Start one, unless there is one."""
    lock = os.open(os.path.join(folder, AGENT_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _spawn_agent(folder, environ, lock)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _spawn_agent(folder: str, environ: Mapping[str, str], lock: int) -> None:
    """In a session of its own; the shell between leaves no child that the script could reap."""
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
    """The interpreter ends: say what is known of it, and leave nothing that nobody needs."""
    if not link.attached:
        return  # a copy of the rank
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        from trainer_sdk.bootstrap import exception_record  # most ranks need none of it

        with suppress(OSError):
            exception_record.write(error, {}, link.folder)
    link.ended(1 if error else 0, error=error is not None)
    if not os.path.exists(os.path.join(folder, LOG)):
        with suppress(FileNotFoundError):  # an agent has been here, found no bus, and cleared away
            _start_agent(folder, environ)  # the first rank has not come: nobody knows of this one
    if is_held(os.path.join(folder, AGENT_LOCK)):
        return  # it still reads what we have said
    with suppress(OSError):
        if os.path.samestat(os.fstat(holds), os.stat(os.path.join(folder, layout.LOCK_FILE))):
            fcntl.flock(holds, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not while other ranks are here
            shutil.rmtree(folder, ignore_errors=True)
