"""What every demonstration stands on: one `everstep up`, agents, and what REST tells of them."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from everstep_services.agent.ranks.process_tree import descendants
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import RunningServices, StateDir

_ENDS_WITHIN_S = 30.0


class EndSignals:
    """The signals that end the demonstration. While a process is started, they wait.

    A process that was started, but not noted yet, would outlive the demonstration.
    """

    def __init__(self) -> None:
        self._waits = False
        self._waiting: int | None = None

    def install(self) -> None:
        """Handle the signals from now on, but for an interrupt that is ignored, as with nohup."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._heard)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Let the signals wait until the end of the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            if self._waiting is not None:
                _end(self._waiting)

    def _heard(self, number: int, frame: object) -> None:
        del frame
        self._waiting = number
        if not self._waits:
            _end(number)


def _end(number: int) -> NoReturn:
    """Stop what was started on the way out."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


END_SIGNALS = EndSignals()


class Cluster:
    """One `everstep up` as a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, settings: str = "", port: int = 0) -> None:
        self.folder = folder
        self._port = port
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
        command = ["up", "--port", str(self._port)]
        if self._settings:
            file = self.folder / "everstep.toml"
            file.write_text(self._settings)
            command += ["--config", str(file)]
        with END_SIGNALS.put_off():
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
    """The last line of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def _everstep(arguments: list[str], state: StateDir, log: Path) -> "subprocess.Popen[bytes]":
    command, *rest = arguments
    with log.open("ab") as file:
        return subprocess.Popen(  # noqa: S603  ourselves
            [
                *(sys.executable, "-P", "-m", "everstep_services.cli"),
                *(command, "--state-dir", str(state.path), *rest),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


JOB = "demo"
_PACE_S = 0.02
WITHIN_S = 180.0


@dataclass
class DemoStory:
    """The state of the job, from REST."""

    cluster: Cluster
    api: Api
    began: float = field(default_factory=time.monotonic)
    agents: list[DemoAgent] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Print what happens, and when."""
        click.echo(f"{time.monotonic() - self.began:6.1f} s  {text}")

    def start(self, nodes: tuple[str, ...], arguments: list[str]) -> None:
        """Start one agent for each node."""
        for place, node in enumerate(nodes):
            own = ["--infra-rank", str(place), "--job", JOB, *arguments]
            with END_SIGNALS.put_off():
                self.agents.append(DemoAgent(self.cluster, node, own))

    def wait_until(self, is_so: Callable[[], bool], event: str) -> None:
        """Look until it is so; an agent that ends meanwhile is the end of the show."""
        deadline = time.monotonic() + WITHIN_S
        while not is_so():
            for agent in self.agents:
                if agent.poll():
                    raise CliError(f"{agent.node} failed: {last_line(agent.log)}")
            if time.monotonic() > deadline:
                raise CliError(f"{event} did not come within {WITHIN_S:g} s: see {JOB} in REST")
            time.sleep(_PACE_S)

    def recovered(self) -> list[Mapping[str, Any]]:
        """Incidents that are over, the oldest first."""
        incidents = self.api.pages(f"jobs/{JOB}/incidents", {"order": "asc"}, most=None)
        return [incident for incident in incidents if incident["outcome"]]

    def facts(self, kind: str) -> list[Mapping[str, Any]]:
        """All facts of this kind, in their order."""
        return list(self.api.pages("facts", {"job": JOB, "kind": kind}, most=None))


@contextmanager
def stage(settings: str = "", port: int = 0) -> Iterator[DemoStory]:
    """The stage while it is open. Nothing that was started outlives it, but the folder."""
    if importlib.util.find_spec("torch") is None:
        raise CliError(
            f"{sys.executable} has no torch, which the demo trains with: pip install torch"
        )
    END_SIGNALS.install()
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="everstep-demo-")), settings, port)
    began = time.monotonic()
    agents: list[DemoAgent] = []
    try:
        click.echo(f"everstep up: ready in {cluster.start():.1f} s, on {cluster.running.api}")
        with Api(cluster.running.api, cluster.state.token_file.read_text().strip()) as api:
            yield DemoStory(cluster, api, began, agents)
    finally:
        for agent in agents:
            agent.stop()
        cluster.stop()


def everstep_on(state: StateDir) -> str:
    """How this shell starts us, on this state."""
    on_path = shutil.which("everstep")
    is_ours = on_path is not None and Path(on_path).parent == Path(sys.executable).parent
    program = "everstep" if is_ours else Path(sys.executable).with_name("everstep")
    return f"{program} --state-dir {state.path}"
