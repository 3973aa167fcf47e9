"""The process of an agent in attach mode: its lock, its door, its bus, and what it leaves."""

import asyncio
import fcntl
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.bus import BusSettings, connect
from everstep.bus.errors import SpoolBusyError
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep_services.agent.attached.plan import AttachedPlan
from everstep_services.agent.attached.service import AttachedService
from everstep_services.agent.attached.watching import Watching
from trainer_sdk import layout
from trainer_sdk.attaching import AGENT_LOCK, SOCKET
from trainer_sdk.bootstrap.link import ShortPath

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class AgentThereError(EverstepError):
    """An agent watches these ranks already."""

    def __init__(self, job: str) -> None:
        super().__init__(f"another agent of this node watches the ranks of job {job}")


@contextmanager
def sole_agent(folder: Path, lock: int) -> Iterator[None]:
    """Be the one that watches the ranks of this folder, by the lock that was handed to us.

    At the end the folder is removed: at once where we cannot watch, else when no rank is left.
    """
    here = os.open(folder / layout.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(here, fcntl.LOCK_SH)  # as long as we look into it, nobody else removes it
        is_needed = False
        try:
            yield
            is_needed = not _locked(here)
        finally:
            if not is_needed and _is_same(lock, folder / AGENT_LOCK):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(here)


async def run_attached(plan: AttachedPlan, settings: BusSettings) -> None:
    """Watch until the ranks have gone, or until a signal says to leave."""
    loop, clock = asyncio.get_running_loop(), SystemClock()
    name = f"agent-{plan.job}-{plan.node}"
    spool = plan.state_dir / "spool" / name
    with _door(plan.folder) as door:
        try:
            # The bus may be away as long as it likes: facts wait in the spool.
            async with connect(settings, name, spool=spool, wait=False) as bus:
                service = AttachedService(plan, bus, clock, Watching(plan, door, clock))
                for number in _ENDS:
                    text = f"the agent that watched it was ended by {number.name}"
                    loop.add_signal_handler(number, service.leave, text)
                await service.run()
        except SpoolBusyError as error:
            raise AgentThereError(plan.job) from error


@contextmanager
def _door(folder: Path) -> Iterator[socket.socket]:
    """Where ranks say what is rare."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as door:
        with ShortPath(str(path)) as short:
            door.bind(short)
        path.chmod(0o600)
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


def _locked(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
