"""What the demonstration kills: one `everstep up`, and agents that it started itself."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from everstep_services.agent.ranks.process_tree import descendants
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import RunningServices, StateDir

_ENDS_WITHIN_S = 30.0


class Cluster:
    """One `everstep up` as a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self.folder = folder
        self._settings = settings
        """As in a settings file, which is read instead of others; empty for those."""
        self.state = StateDir(folder / "state")
        self._log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> RunningServices:
        running = self.state.running()
        if running is None:
            raise CliError(f"everstep up is not ready; its log is {self._log}")
        return running

    def start(self) -> float:
        """Seconds until it was ready."""
        began = time.monotonic()
        command = ["up", "--api-port", "0"]
        if self._settings:
            file = self.folder / "everstep.toml"
            file.write_text(self._settings)
            command += ["--config", str(file)]
        self._process = _everstep(command, self.state, self._log)
        while self.state.running() is None:
            if self._process.poll() is not None:
                raise CliError(f"everstep up failed: {last_line(self._log)}")
            time.sleep(0.02)
        return time.monotonic() - began

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=_ENDS_WITHIN_S)


class DemoAgent:
    """One `everstep run`, as a node of its own name."""

    def __init__(self, cluster: Cluster, node: str, arguments: list[str]) -> None:
        self.node = node
        self.log = cluster.folder / f"{node}.log"
        self._process = _everstep(["run", "--node-id", node, *arguments], cluster.state, self.log)

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        return self._process.poll()

    def wait(self, within_s: float) -> int:
        """Its exit code."""
        return self._process.wait(timeout=within_s)

    def kill(self) -> int:
        """End it as a power cut does: with everything that it started; how many processes."""
        pids = [self._process.pid, *descendants(self._process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):  # its warden is as quick as we are
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        return len(pids)

    def stop(self) -> None:
        """End it, whatever it does; the kernel and its warden end the rest."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def last_line(log: Path) -> str:
    """What a process said last."""
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def _everstep(arguments: list[str], state: StateDir, log: Path) -> "subprocess.Popen[bytes]":
    command, *rest = arguments
    with log.open("ab") as file:
        return subprocess.Popen(  # noqa: S603  ourselves
            [
                *(sys.executable, "-m", "everstep_services.cli"),
                *(command, "--state-dir", str(state.path), *rest),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
