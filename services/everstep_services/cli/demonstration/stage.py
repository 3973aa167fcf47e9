"""What every demonstration stands on: one `everstep up`, agents, and what REST tells of them."""

import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from everstep_services.cli.api.client import Api
from everstep_services.cli.demonstration.cluster import Cluster, DemoAgent, last_line
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import StateDir

JOB = "demo"
_PACE_S = 0.02
WITHIN_S = 180.0


@dataclass
class DemoStory:
    """What is going on, as REST tells it."""

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
def stage(settings: str = "") -> Iterator[DemoStory]:
    """The stage while it is open. Nothing that was started outlives it, but the folder."""
    if importlib.util.find_spec("torch") is None:
        raise CliError(f"{sys.executable} has no torch, which the demo trains with: make demo")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="everstep-demo-")), settings)
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


def _ended(number: int, frame: object) -> NoReturn:
    """What was started is stopped on the way out, as it is after Ctrl-C."""
    del frame
    raise SystemExit(128 + number)


def everstep_on(state: StateDir) -> str:
    """How this shell starts us, on this state."""
    on_path = shutil.which("everstep")
    is_ours = on_path is not None and Path(on_path).parent == Path(sys.executable).parent
    program = "everstep" if is_ours else Path(sys.executable).with_name("everstep")
    return f"{program} --state-dir {state.path}"
