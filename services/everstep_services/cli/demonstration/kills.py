"""A real training on three agents: a rank is killed, then a node, and training goes on."""

import itertools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from everstep_services.cli.demonstration.stage import JOB, WITHIN_S, DemoStory, everstep_on, stage
from everstep_services.cli.errors import Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_table, wants_color
from everstep_services.cli.pages.incidents.verdict import verdict_lines

_SCRIPT = Path(__file__).with_name("train.py")
_STEPS_MOST = 1_000_000
_REST_S = 0.02
"""After each step: ranks that never rest take the processors from all that is shown."""
_PHASES = {
    "unfinished": "cut",
    "detect": "detect",
    "evidence": "look",
    "decide": "decide",
    "stop": "stop",
    "rendezvous": "form",
    "start": "start",
    "first_step": "step",
}
"""Of the ledger, and how they are called where a column is narrow."""
_VERDICT_LINES = 2
"""What it is and why: `everstep why` has the rest."""


def demonstrate(invocation: Invocation, steps: int | None, port: int) -> int:
    """0 when the training recovered twice and finished: after these steps, or soon after that."""
    with stage(port=port) as story:
        click.echo("everstep run: three agents: two train with two ranks each, one stands by")
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--spares", "1"]
        script = [str(_SCRIPT), str(story.cluster.folder), str(steps or _STEPS_MOST), str(_REST_S)]
        story.start(("node-1", "node-2", "node-3"), [*options, *script])
        _act(story)
        if steps is None:
            (story.cluster.folder / "enough").touch()
        story.wait_until(lambda: _job(story)["state"] == "done", "the end of the training")
        story.say("the training is done")
        return _conclude(invocation, story)


def _act(story: DemoStory) -> None:
    say = story.say
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


def _trains(story: DemoStory, times: int) -> bool:
    return sum(1 for fact in story.facts("progress_made") if fact["body"].get("is_first")) >= times


def _job(story: DemoStory) -> Mapping[str, Any]:
    job: Mapping[str, Any] = story.api.get(f"jobs/{JOB}")
    return job


def _conclude(invocation: Invocation, story: DemoStory) -> int:
    codes = {agent.node: agent.wait(WITHIN_S) for agent in story.agents}
    incidents = story.recovered()
    click.echo("\nWhat happened, and where the time went (milliseconds):\n")
    rows = [_row(incident) for incident in incidents]
    print_table(rows, list(rows[0]), color=wants_color(invocation))
    job, everstep = _job(story), everstep_on(story.cluster.state)
    click.echo(f"\nThe job is {job['state']} after {job['rounds']} rounds; exit codes {codes}.")
    for incident in incidents:
        click.echo(f"  {incident['story']}")
        for line in _verdict(story, incident["incident"]):
            click.echo(f"    {line}")
    url = f"{story.api.url}/api/v1/jobs/{JOB}"
    click.echo(f"\nThe record stays. This reads it, and serves it again at {url}:")
    port = urlsplit(story.api.url).port
    for words in (f"up --detach --port {port}", f"why {JOB}", f"job show {JOB}", "down"):
        click.echo(f"  {everstep} {words}")
    click.echo(f"All of it took {time.monotonic() - story.began:.1f} s.")
    is_good = len(incidents) == 2 and job["state"] == "done" and not any(codes.values())
    return Exit.OK if is_good else Exit.ERROR


def _verdict(story: DemoStory, incident: str) -> list[str]:
    """What attribution says of an incident: nothing waits for it, but this."""
    judged: list[Mapping[str, Any]] = []

    def is_judged() -> bool:
        judged.append(story.api.get(f"incidents/{incident}"))
        return judged[-1]["verdict"] is not None

    story.wait_until(is_judged, "the verdict")
    return list(itertools.islice(verdict_lines(judged[-1]), _VERDICT_LINES))


def _row(incident: Mapping[str, Any]) -> dict[str, str]:
    ledger = incident["ledger"]
    spent = {name: f"{ledger[f'{phase}_s'] * 1000:.0f}" for phase, name in _PHASES.items()}
    cause = incident["story"].partition(";")[0].partition(":")[0]
    return {"what": cause, **spent, "all": f"{ledger['wall_s'] * 1000:.0f}"}
