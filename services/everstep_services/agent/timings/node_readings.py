"""The readings of a node and its ranks at the end of a window: from the kernel and the driver.

Both may hang: a thread reads that delays neither the loop nor the end of the process.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from everstep.messages import DeviceUse, KernelTiming
from everstep_services.agent.collectors.collection import left_file
from everstep_services.agent.timings import connections, host
from everstep_services.agent.timings.host import (
    HostReading,
    ProcessReading,
    System,
    Workers,
    device_uses,
)
from trainer_sdk import layout

T = TypeVar("T")

_KERNELS = msgspec.json.Decoder(tuple[KernelTiming, ...])
_KERNELS_MOST_BYTES = 1 << 16


class DetachedThread(Generic[T]):
    """Runs one call at a time: while one hangs, no other begins."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T], within_s: float) -> T | None:
        """The result of the call; None if it, or one before it, takes longer."""
        if self._thread is not None and self._thread.is_alive():
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                finish, outcome = _succeed, work()
            except Exception as error:  # noqa: BLE001  raised in the caller that awaits it
                finish, outcome = _fail, error  # type: ignore[assignment]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, done, outcome)

        # Not of the loop's pool: at its end the process would wait for it.
        self._thread = threading.Thread(target=call, name=self._name, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(within_s):
                return await done
        except TimeoutError:
            return None


def _succeed(done: "asyncio.Future[T]", result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: "asyncio.Future[T]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


@dataclass(frozen=True, slots=True)
class NodeReadings:
    """The readings of the host and its processes at the end of a window."""

    node: HostReading = field(default_factory=HostReading)
    processes: Mapping[int, ProcessReading] = field(default_factory=dict)
    devices: Mapping[int, DeviceUse] = field(default_factory=dict)
    kernels: Mapping[int, tuple[float, tuple[KernelTiming, ...]]] = field(default_factory=dict)


def read_all(
    ranks: Mapping[int, tuple[int, Path]], system: System, workers: Workers
) -> NodeReadings:
    """Read the host and the ranks from the kernel and the driver: each process and its folder."""
    pids = {rank: pid for rank, (pid, _) in ranks.items()}
    sockets = connections.connections()
    workers_cpu_s = workers.cpu_s(frozenset(pids.values()), system)
    processes = {}
    for rank, pid in pids.items():
        inodes = connections.inodes_of(pid, system.proc) if sockets else frozenset()
        own = {measured.inode: measured for measured in connections.of_process(sockets, inodes)}
        processes[rank] = host.read_process(pid, workers_cpu_s[pid], own, system)
    devices = device_uses(pids.values())
    return NodeReadings(
        node=host.read_host(system),
        processes=processes,
        devices={rank: devices[pid] for rank, pid in pids.items() if pid in devices},
        kernels={rank: _kernels_in(folder) for rank, (_, folder) in ranks.items()},
    )


def _kernels_in(folder: Path) -> tuple[float, tuple[KernelTiming, ...]]:
    """The kernel times that the rank wrote, and when; it may write anything."""
    path = folder / layout.KERNELS_FILE
    try:
        written_s = path.stat().st_mtime
        return written_s, _KERNELS.decode(left_file(path, _KERNELS_MOST_BYTES) or b"[]")
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return 0.0, ()
