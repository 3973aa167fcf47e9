"""The thread of a rank that receives faults, in a process of its own: it never ends."""

import subprocess
import sys
from pathlib import Path

from tests.waiting import WITHIN_S

SCRIPT = """
import os, resource, signal, socket, sys, threading, types
from trainer_sdk import layout
from trainer_sdk.inject import listener

limited, noticed, lifted = threading.Event(), threading.Event(), threading.Event()
mask = {"pthread_sigmask": lambda *_: limited.wait()}  # a thread in `accept` has a descriptor
listener.signal = types.SimpleNamespace(**{**vars(signal), **mask})
listener.time = types.SimpleNamespace(sleep=lambda _: (noticed.set(), lifted.wait()))
listener.listen(types.SimpleNamespace(folder=sys.argv[1]))
caller = socket.socket(socket.AF_UNIX)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
limited.set()
caller.connect(os.path.join(sys.argv[1], layout.INJECTION_SOCKET))
assert noticed.wait(60)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
lifted.set()
caller.sendall(b"nothing that it knows")
print(caller.recv(4096).decode())
"""


def test_it_goes_on_once_its_process_has_descriptors_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert '"refused"' in done.stdout, done.stderr
