"""One contender's processes, from their start until none of them is left."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.restarts.marks import Life, Marks

_TAG, _NODE = "BENCH_STAGE", "BENCH_NODE"
_KEPT = ("PATH", "HOME", "LANG")
_ROOT = Path(__file__).parents[2]
_GONE_WITHIN_S = 20.0


class Stage:
    """A folder, and what was started in it. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marks = Marks(folder / "marks")
        self.began = time.monotonic()
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all that was started here, wherever it has gone since."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while left := self._tagged():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there after {_GONE_WITHIN_S:g} s: {left}")
            _send(left, signal.SIGKILL)
            for process in self._agents.values():
                process.poll()
            time.sleep(0.05)
        for process in self._agents.values():
            process.wait()

    def start(self, node: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a program whose output goes to a file named after the node."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        tags = {_TAG: str(self.folder), _NODE: node}
        with (self.folder / f"{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(
                command,
                env={**kept, **own, **tags, **environ},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def first_life(self, within_s: float) -> Life:
        """Once the training makes steps."""
        life = self.marks.after(self.began, within_s)
        if life is None:
            raise TimeoutError(f"no first step within {within_s:g} s; look into {self.folder}")
        return life

    def ended(self) -> dict[str, int]:
        """Programs that have ended by themselves, and how."""
        codes = {node: process.poll() for node, process in self._agents.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def pid(self, node: str) -> int:
        """The program itself: the agent."""
        return self._agents[node].pid

    def pids(self, node: str = "") -> list[int]:
        """An agent, and all that it has started, the agent first; or all that runs here."""
        agent = self.pid(node) if node else 0
        return sorted(self._tagged(node), key=lambda pid: (pid != agent, pid))

    def left_of(self, life: Life) -> int:
        """How many ranks of a life still run, or stand."""
        pids = set(self._tagged())
        return sum(mark.pid in pids for mark in life.marks)

    def _tagged(self, node: str = "") -> list[int]:
        wanted = {f"{_TAG}={self.folder}".encode()}
        if node:
            wanted.add(f"{_NODE}={node}".encode())
        found = []
        for pid in psutil.pids():
            try:
                words = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if wanted <= words:
                found.append(pid)
        return found


def kill(pids: Sequence[int]) -> float:
    """Kill these at once; when that began."""
    began = time.monotonic()
    _send(pids, signal.SIGKILL)
    return began


def freeze(pids: Sequence[int]) -> float:
    """Stop these as they stand; when that began."""
    began = time.monotonic()
    _send(pids, signal.SIGSTOP)
    return began


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
