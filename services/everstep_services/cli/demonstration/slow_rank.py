"""A real training in which a rank becomes slow: it is named with its cause, and cleared again."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click

from everstep_services.cli.demonstration.stage import JOB, DemoStory, everstep_on, stage
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_table, wants_color

_SCRIPT = Path(__file__).with_name("slow_trainer.py")
_SETTINGS = """
[straggler]
window_s = 1.5
slower_ratio = 0.25
report_every_s = 0
"""
"""Short windows; and other work of this machine does not count as a slow rank."""
_RANK, _LOSES_S = 2, 0.03
_RANKS = 4


def demonstrate(invocation: Invocation, port: int) -> int:
    """0 when the slow rank was named, with its cause, and cleared again."""
    with stage(_SETTINGS, port) as story:
        click.echo("everstep run: two agents, which train with two ranks each")
        script = [str(_SCRIPT), str(story.cluster.folder), "sections"]
        options = ["--nnodes", "2", "--nproc-per-node", "2"]
        story.start(("node-1", "node-2"), [*options, *script])
        finding = _act(story)
        (story.cluster.folder / "end").touch()
        codes = {agent.node: agent.wait(within_s=60) for agent in story.agents}
        click.echo(f"\nThe training is done; exit codes {codes}.")
        state = everstep_on(story.cluster.state)
        click.echo("The record stays. This reads it:")
        for words in ("up --detach", f"stragglers {JOB} --history", "down"):
            click.echo(f"  {state} {words}")
        is_right = (finding["rank"], finding["cause"]) == (_RANK, "input")
        _print(invocation, finding)
        return Exit.OK if is_right and not any(codes.values()) else Exit.ERROR


def _act(story: DemoStory) -> Mapping[str, Any]:
    def compared() -> bool:
        return len(_own_times(story)) == _RANKS

    story.wait_until(compared, "the first window")
    usual_ms = median(_own_times(story).values()) * 1e3
    story.say(f"the training makes steps: each rank computes for {usual_ms:.0f} ms in each")
    cause = story.cluster.folder / f"slow-input-{_RANK}"
    cause.write_text(str(_LOSES_S))
    story.say(f"from now on rank {_RANK} waits {_LOSES_S * 1e3:.0f} ms longer for its data")
    story.wait_until(lambda: bool(story.facts("straggler_found")), "the finding")
    finding: Mapping[str, Any] = story.facts("straggler_found")[0]["body"]
    story.say(
        f"found: rank {finding['rank']} on {finding['node']} is slow, cause {finding['cause']}"
    )
    click.echo(f"          {finding['reason']}")
    cause.unlink()
    story.say(f"rank {_RANK} has its data as fast as the others again")
    story.wait_until(lambda: bool(story.facts("straggler_cleared")), "the end of the finding")
    cleared = story.facts("straggler_cleared")[0]["body"]
    story.say(f"cleared: {cleared['reason']}")
    return finding


def _own_times(story: DemoStory) -> Mapping[int, float]:
    """What each rank needed by itself in the newest window."""
    try:
        now = story.api.get(f"jobs/{JOB}/stragglers/now")
    except CliError:
        return {}  # nothing was heard of the job yet
    return {row["rank"]: row["own_s"] for row in now["ranks"] if row["own_s"] is not None}


def _print(invocation: Invocation, finding: Mapping[str, Any]) -> None:
    loses = finding["slowdown_ratio"]
    row = {
        "rank": str(finding["rank"]),
        "node": finding["node"],
        "cause": finding["cause"],
        "section": finding["section"] or "",
        "slower than others": f"{finding['scores'][0]['value_s'] * 1e3:.0f} ms against "
        f"{finding['scores'][0]['reference_s'] * 1e3:.0f} ms",
        "the job without it": "" if loses is None else f"{loses * 100:.0f} % faster",
        "windows": str(finding["windows"]),
        "confidence": "" if finding["confidence"] is None else f"{finding['confidence']:.2f}",
    }
    click.echo("")
    print_table([row], list(row), color=wants_color(invocation))
