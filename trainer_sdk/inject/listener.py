"""A thread of a rank that receives faults from its agent, on a socket in the rank's folder.

The agent sends a line; the rank answers whether it can make that fault; the agent records the
fault, and sends `go`. Only the user of the job can reach the folder.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from typing import Any

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink, ShortPath
from trainer_sdk.inject.catalog import BadFaultError, fault_request
from trainer_sdk.inject.rank_faults import check, make

_FOR_THREADS_ONLY = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_MOST_BYTES = 4096
_WITHIN_S = 10.0
_PAUSE_S = 1.0


def listen(link: AgentLink) -> None:
    """Listen until the process ends; a forked child does not listen."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with ShortPath(os.path.join(link.folder, layout.INJECTION_SOCKET)) as path:
        server.bind(path)
    server.listen(4)
    name = "everstep-injection"
    threading.Thread(target=_serve, args=(server, link), name=name, daemon=True).start()


def _serve(server: socket.socket, link: AgentLink) -> None:
    # The main thread handles signals; in this thread they would interrupt a fault that waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FOR_THREADS_ONLY)
    while True:
        try:
            peer, _ = server.accept()
        except OSError:  # the script has used up its descriptors: it may close some
            time.sleep(_PAUSE_S)
            continue
        with peer, contextlib.suppress(OSError):
            peer.settimeout(_WITHIN_S)
            _answer(peer, link)


def _answer(peer: socket.socket, link: AgentLink) -> None:
    try:
        asked: dict[str, Any] = json.loads(peer.recv(_MOST_BYTES))
        wished = fault_request(
            asked["fault"],
            for_s=asked.get("for_s"),
            amount=asked.get("amount"),
            target=asked.get("target", ""),
        )
        check(wished)
    except (BadFaultError, KeyError, TypeError, ValueError, RecursionError) as error:
        peer.sendall(json.dumps({"refused": str(error)}).encode())
        return
    peer.sendall(b'{"refused":""}')
    if peer.recv(_MOST_BYTES) == b"go":
        make(wished, lambda: link.words)
