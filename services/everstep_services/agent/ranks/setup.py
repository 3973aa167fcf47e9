"""The files that a warden needs, and its process. Everything blocks: call it in a thread."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.messages.facts.ranks import ErrorRecord
from everstep.observe.redaction import redact
from everstep_services.agent.collectors.collection import left_file
from everstep_services.agent.ranks import process_tree
from everstep_services.agent.ranks.liveness_port import LivenessPort, opened_liveness_port
from everstep_services.agent.ranks.process_tree import become_subreaper
from everstep_services.agent.ranks.protocol import NodePlan, StartRefusedError, rank_folder
from everstep_services.agent.ranks.survivors import SURVIVE_SOCKET
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import ShortPath
from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.page import PageView, make_page
from trainer_sdk.wire import RankEntry, WardenPlan, encode, pack

_SOCKET = "agent.sock"
_ERROR_MOST_BYTES = 1 << 20
_WARDEN = "everstep_services.agent.ranks.warden"


@dataclass(frozen=True, slots=True)
class WardenSetup:
    """A running warden, and the sockets that connect it and the ranks with this process."""

    warden: "subprocess.Popen[bytes]"
    control: socket.socket
    datagrams: socket.socket
    swept: int
    """The number of processes of dead agents that were found and killed."""
    others: frozenset[int]
    """Children that this process had before: the warden leaves them alone."""
    door: LivenessPort | None = None
    """Where others may ask whether the warden lives."""


def hold(folder: Path) -> int:
    """Make an agent's folder, and take its lock: while that is held, nobody removes the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with process_tree.alone_in(folder.parent):
        return _lock(folder / layout.LOCK_FILE)


def lay(plan: NodePlan, lock: int) -> WardenSetup:
    """Kill leftovers of dead agents, bind the socket, start the warden, which shares the lock."""
    others = frozenset(process_tree.children(os.getpid()))
    become_subreaper()
    swept = process_tree.kill_leftovers()
    datagrams = _bound(plan.runtime_dir / _SOCKET)
    ours, theirs = socket.socketpair()
    opened = opened_liveness_port(plan.address)
    with ExitStack() as stack:
        stack.enter_context(theirs)
        log = stack.enter_context(open(plan.runtime_dir / "warden.log", "ab"))
        doors = [] if opened is None else [stack.enter_context(opened[0]).fileno()]
        stack.enter_context(_held_signals())
        inherited = (theirs.fileno(), lock, *doors)
        warden = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", "-m", _WARDEN, *map(str, inherited)],
            # Ranks may read what `everstep run` may read, as under torchrun.
            stdin=None if sys.stdin is not None else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=plan.environ,
            pass_fds=inherited,
            start_new_session=True,
        )
    door = None if opened is None else opened[1]
    ours.sendall(encode(_warden_plan(plan, "" if door is None else door.token)))
    ours.settimeout(0)
    return WardenSetup(warden, ours, datagrams, swept, others, door)


@contextmanager
def _held_signals() -> Iterator[None]:
    """Block, in all processes that this thread starts, the signals that are sent to whole jobs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare(plan: NodePlan, number: int, rank: RankEntry) -> tuple[RankEntry, Path, PageView]:
    """Make a rank's folder and its page; return them with the entry for the warden."""
    folder = rank_folder(plan.runtime_dir, number, rank.rank)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in (
            layout.ERROR_FILE,
            layout.ELASTIC_ERROR_FILE,
            layout.WORKER_SOCKET,
            layout.STACKS_FILE,
        ):
            (folder / name).unlink(missing_ok=True)
        page = make_page(str(folder / "page"))
    except OSError as error:
        raise StartRefusedError(
            f"rank {rank.rank} cannot start: {error}; make room in {folder}, or choose another "
            f"runtime directory"
        ) from error
    environ = {
        **rank.environ,
        **_tags(plan),
        layout.SOCKET_VARIABLE: str(plan.runtime_dir / _SOCKET),
        layout.SURVIVE_VARIABLE: str(plan.runtime_dir / SURVIVE_SOCKET),
        layout.PAGE_VARIABLE: str(folder / "page"),
        layout.FOLDER_VARIABLE: str(folder),
        layout.ROUND_VARIABLE: str(number),
        "RANK": str(rank.rank),
    }
    return msgspec.structs.replace(rank, environ=pack(environ)), folder, page


def sweep(base: Path) -> None:
    """Remove the folders of killed agents: nobody holds their locks any more."""
    with process_tree.alone_in(base):
        for folder in base.iterdir():
            if process_tree.is_free(str(folder / layout.LOCK_FILE)):
                shutil.rmtree(folder, ignore_errors=True)


def read_error(folder: Path) -> ErrorRecord | None:
    """The exception that a rank has recorded; None if there is none, or what no rank records.

    What looks like a secret in its texts is masked here, so neither a fact nor a message has it.
    """
    try:
        octets = left_file(folder / layout.ERROR_FILE, _ERROR_MOST_BYTES) or b""
        error = msgspec.json.decode(octets, type=ErrorRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return msgspec.structs.replace(
        error, text=redact(error.text), traceback=redact(error.traceback)
    )


def _warden_plan(plan: NodePlan, token: str) -> WardenPlan:
    return WardenPlan(
        command=plan.command,
        cwd=str(plan.cwd),
        python=plan.python,
        environ=pack({**plan.environ, **_tags(plan)}),
        folder=str(plan.runtime_dir),
        warm=plan.warm,
        preload=plan.preload,
        own=plan.own,
        token=token,
    )


def _tags(plan: NodePlan) -> dict[str, str]:
    """The marks by which a process is found after its agent and its warden have died."""
    return {
        layout.INSTANCE_VARIABLE: plan.instance,
        layout.LOCK_VARIABLE: str(plan.runtime_dir / layout.LOCK_FILE),
    }


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StartRefusedError(
            f"another agent uses {path.parent}: give each a runtime directory of its own, or "
            f"wait until the other has ended"
        ) from error
    return descriptor


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.settimeout(0)
    with ShortPath(str(path)) as short:
        made.bind(short)
    return made
