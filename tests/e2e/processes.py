"""Processes of a test: started in a folder of their own, seen to be gone at its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.e2e import lifeline
from tests.e2e.failure_logs import ENDINGS
from tests.waiting import WITHIN_S

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
TAG = "END_TO_END_TEST"
"""In the environment of whatever a test starts, and of what that starts."""


def environment(folder: Path, tag: str, **more: str) -> dict[str, str]:
    """Nothing of the person who runs the tests."""
    runtime, memory = folder / "runtime", folder / "memory"
    for place in (runtime, memory):
        place.mkdir(parents=True, exist_ok=True)
    own = {
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(runtime),
        "EVERSTEP_AGENT__CHECKPOINTS__MEMORY_DIR": str(memory),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        TAG: tag,
    }
    return {**lifeline.bare_environment(), **own, **more}


class Process:
    """One program, whose output goes to a file: a test that fails shows its end."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path, cwd: Path | None = None
    ) -> None:
        assert log.suffix in ENDINGS, f"the report of a failed test does not have {log.name}"
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Its exit code."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {within_s:g} s:\n{self.said}") from None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it alone, and wait until it has."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        self._process.terminate()
        return self.wait()

    @property
    def said(self) -> str:
        """All of its output so far."""
        return self.log.read_text(errors="replace")


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def below(pid: int) -> list[psutil.Process]:
    """The processes below one; found by somebody else's code than that which kills them."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def tagged(tag: str, name: str = TAG) -> list[int]:
    """Every living process with the tag in its environment."""
    wanted, found = f"{name}={tag}".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and wanted in Path(f"/proc/{entry}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]


def kill_all(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
