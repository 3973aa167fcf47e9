"""A real training on three agents: a rank is killed, then a node, and training goes on."""

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click

from everstep_services.cli.client import Api
from everstep_services.cli.demonstration.cluster import Agent, Cluster, last_line
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_table, wants_color
from everstep_services.cli.state import StateDir

JOB = "demo"
_SCRIPT = Path(__file__).with_name("train.py")
_PACE_S = 0.02
_WITHIN_S = 180.0
_PHASES = {
    "detect": "detect",
    "evidence": "look",
    "decide": "decide",
    "stop": "stop",
    "rendezvous": "form",
    "start": "start",
    "first_step": "step",
}
"""Of the ledger, and how they are called where a column is narrow."""


@dataclass
class Story:
    """What is going on, as REST tells it."""

    api: Api
    agents: list[Agent]

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Look until it is so; an agent that ends meanwhile is the end of the show."""
        deadline = time.monotonic() + _WITHIN_S
        while not is_so():
            for agent in self.agents:
                if agent.poll():
                    raise CliError(f"{agent.node} failed: {last_line(agent.log)}")
            if time.monotonic() > deadline:
                raise CliError(f"{what} did not come within {_WITHIN_S:g} s: see {JOB} in REST")
            time.sleep(_PACE_S)

    def recovered(self) -> list[Mapping[str, Any]]:
        """Incidents that are over, the oldest first."""
        found = self.api.pages(f"jobs/{JOB}/incidents", {"order": "asc"}, most=None)
        return [incident for incident in found if incident["outcome"]]

    def facts(self, kind: str) -> list[Mapping[str, Any]]:
        """All facts of this kind, in their order."""
        return list(self.api.pages("facts", {"job": JOB, "kind": kind}, most=None))


def demonstrate(invocation: Invocation, steps: int) -> int:
    """0 when the training recovered twice and came to its end."""
    if importlib.util.find_spec("torch") is None:
        raise CliError(f"{sys.executable} has no torch, which the demo trains with: make demo")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ended)
    folder = Path(tempfile.mkdtemp(prefix="everstep-demo-"))
    began = time.monotonic()
    cluster, agents = Cluster(folder), list[Agent]()
    try:
        click.echo(f"everstep up: ready in {cluster.start():.1f} s, on {cluster.running.api}")
        agents += _agents(cluster, steps)
        with Api(cluster.running.api, cluster.state.token_file.read_text().strip()) as api:
            story = Story(api, agents)
            _act(story, began)
            return _conclude(invocation, cluster, story, began)
    finally:
        for agent in agents:
            agent.stop()
        cluster.stop()


def _ended(number: int, frame: object) -> NoReturn:
    """What was started is stopped on the way out, as it is after Ctrl-C."""
    del frame
    raise SystemExit(128 + number)


def _agents(cluster: Cluster, steps: int) -> list[Agent]:
    arguments = [
        *("--job", JOB, "--nnodes", "2", "--nproc-per-node", "2", "--spares", "1"),
        *(str(_SCRIPT), str(cluster.folder), str(steps)),
    ]
    click.echo("everstep run: three agents: two train with two ranks each, one stands by")
    nodes = ("node-1", "node-2", "node-3")
    return [
        Agent(cluster, node, ["--infra-rank", str(place), *arguments])
        for place, node in enumerate(nodes)
    ]


def _act(story: Story, began: float) -> None:
    def say(text: str) -> None:
        click.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    story.wait_until(lambda: _trains(story, 1), "the first step")
    say("the training makes steps")
    rank = story.facts("rank_started")[-1]["body"]
    say(f"kill -9: rank {rank['rank']} on {rank['node']}")
    os.kill(int(rank["pid"]), signal.SIGKILL)
    story.wait_until(lambda: len(story.recovered()) == 1, "the next step")
    say("the training is back")
    holder = story.facts("round_formed")[-1]["body"]["members"][1][1]
    victim = next(agent for agent in story.agents if agent.node == holder)
    story.agents.remove(victim)
    killed = victim.kill()
    say(f"kill -9: {holder}, its agent and all that it started ({killed} processes)")
    story.wait_until(lambda: len(story.recovered()) == 2, "the next step")
    say("the training is back")
    story.wait_until(lambda: _job(story)["state"] == "done", "the end of the training")
    say("the training is done")


def _trains(story: Story, times: int) -> bool:
    return sum(1 for fact in story.facts("progress_made") if fact["body"].get("is_first")) >= times


def _job(story: Story) -> Mapping[str, Any]:
    job: Mapping[str, Any] = story.api.get(f"jobs/{JOB}")
    return job


def _conclude(invocation: Invocation, cluster: Cluster, story: Story, began: float) -> int:
    codes = {agent.node: agent.wait(_WITHIN_S) for agent in story.agents}
    incidents = story.recovered()
    click.echo("\nWhat happened, and where the time went (milliseconds):\n")
    rows = [_row(incident) for incident in incidents]
    print_table(rows, list(rows[0]), color=wants_color(invocation))
    job, everstep = _job(story), _everstep(cluster.state)
    click.echo(f"\nThe job is {job['state']} after {job['rounds']} rounds; exit codes {codes}.")
    for incident in incidents:
        click.echo(f"  {incident['story']}")
    url = f"{story.api.url}/api/v1/jobs/{JOB}"
    click.echo(f"\nThe record stays. This reads it, and serves it again at {url}:")
    port = urlsplit(story.api.url).port
    for words in (f"up --detach --api-port {port}", f"why {JOB}", f"job show {JOB}", "down"):
        click.echo(f"  {everstep} {words}")
    click.echo(f"All of it took {time.monotonic() - began:.1f} s.")
    is_good = len(incidents) == 2 and job["state"] == "done" and not any(codes.values())
    return Exit.OK if is_good else Exit.ERROR


def _everstep(state: StateDir) -> str:
    """How this shell starts us, on this state."""
    found = shutil.which("everstep")
    is_ours = found is not None and Path(found).parent == Path(sys.executable).parent
    program = "everstep" if is_ours else Path(sys.executable).with_name("everstep")
    return f"{program} --state-dir {state.path}"


def _row(incident: Mapping[str, Any]) -> dict[str, str]:
    ledger = incident["ledger"]
    spent = {name: f"{ledger[f'{phase}_s'] * 1000:.0f}" for phase, name in _PHASES.items()}
    what = incident["story"].partition(";")[0].partition(":")[0]
    return {"what": what, **spent, "all": f"{ledger['wall_s'] * 1000:.0f}"}
