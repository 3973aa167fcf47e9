"""Agents of another rendezvous, each a process of its own: how long their first round takes.

    python peer.py torch|nvrx NODES

A program for the interpreter that has the peer; prints who it is, and the seconds from the moment
at which all agents were let go until the last one had its rank. By then each of them had its
handler, connected to the store of the first.
"""

import importlib
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

_NVRX = "nvidia_resiliency_ext.fault_tolerance"
_END = struct.Struct("d")


def main(who: str, nodes: int) -> None:
    elastic, name = _torch() if who == "torch" else _nvrx()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    ready, go, done = os.pipe(), os.pipe(), os.pipe()
    agents = []
    for number in range(nodes):
        pid = os.fork()
        if pid == 0:
            os.close(go[1])
            _agent(elastic, endpoint, nodes, number, (ready[1], go[0], done[1]))
        agents.append(pid)
    try:
        _read(ready[0], nodes)
        began = time.monotonic()
        os.close(go[1])
        ends = [end for (end,) in _END.iter_unpack(_read(done[0], nodes * _END.size))]
    finally:
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(json.dumps({"name": name, "took_s": max(ends) - began}))


def _torch() -> tuple[Any, str]:
    api = importlib.import_module("torch.distributed.elastic.rendezvous")
    registry = importlib.import_module("torch.distributed.elastic.rendezvous.registry")
    elastic = SimpleNamespace(RendezvousParameters=api.RendezvousParameters, rdzv_registry=registry)
    return elastic, f"torch {version('torch').partition('+')[0]}, c10d"


def _nvrx() -> tuple[Any, str]:
    """What its launcher does before it asks for a handler."""
    launcher = importlib.import_module(f"{_NVRX}.launcher")
    launcher._register_ft_rdzv_handler()
    kind = "barrier" if f"{_NVRX}.ft_rendezvous_barrier" in sys.modules else "c10d"
    return launcher, f"NVRx {version('nvidia-resiliency-ext')}, {kind}"


def _agent(
    elastic: Any, endpoint: str, nodes: int, number: int, pipes: tuple[int, int, int]
) -> None:
    """One agent, until it is killed: the store of all may be in it."""
    ready, go, done = pipes
    try:
        _own_sockets()
        asked = elastic.RendezvousParameters(
            *("c10d", endpoint, "bench", nodes, nodes),
            local_addr=f"127.1.{number >> 8}.{number & 255}",
            is_host=number == 0,
            is_store_host=number == 0,  # as NVRx calls it
        )
        handler = elastic.rdzv_registry.get_rendezvous_handler(asked)
        if hasattr(handler, "set_worker_group"):
            handler.set_worker_group(SimpleNamespace(spec=SimpleNamespace(local_world_size=1)))
        os.write(ready, b".")
        os.read(go, 1)
        handler.next_rendezvous()
        os.write(done, _END.pack(time.monotonic()))
        while True:
            signal.pause()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # nobody waits for a round that cannot form


def _own_sockets() -> None:
    """NVRx names a socket after its process, once: before these were forked."""
    modules: list[ModuleType] = [one for name, one in sys.modules.items() if name.startswith(_NVRX)]
    for module in modules:
        if hasattr(module, "FT_LAUNCHER_IPC_SOCKET"):
            path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.socket")
            vars(module)["FT_LAUNCHER_IPC_SOCKET"] = path


def _read(descriptor: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += os.read(descriptor, size - len(found))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
