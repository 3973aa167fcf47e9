"""Read the command line, make the plan, and either show it or hand it to the agent."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep_services.agent.run_plan import RunPlan
from everstep_services.cli.errors import Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_record, say
from everstep_services.cli.run.arguments import Given, UsageError, scan
from everstep_services.cli.run.interfaces import interfaces, judge, likely_devices
from everstep_services.cli.run.plan import plan_run
from everstep_services.cli.run.plan_check import objections, record

_LAUNCH = "everstep_services.cli.run.launch"
Launch = Callable[[Invocation, RunPlan], int]


def start(invocation: Invocation, words: Sequence[str]) -> int:
    """Run as the words after `everstep run` ask, and return the exit code."""
    given = scan(words, invocation.environ)
    _apply_common(invocation, given)
    plan = plan_run(invocation, given)
    faults = list(judge(invocation.environ, interfaces, likely_devices))
    wrong = [*objections(plan), *(fault.text for fault in faults if fault.is_sure)]
    notes = [*plan.notes, *(fault.text for fault in faults if not fault.is_sure)]
    if given.has("check"):
        return _show(invocation, plan, notes, wrong)
    if wrong:
        raise UsageError(wrong[0])
    for note in notes:
        say(f"everstep: {note}")
    launch: Launch = importlib.import_module(_LAUNCH).launch
    return launch(invocation, plan)


def _apply_common(invocation: Invocation, given: Given) -> None:
    """The options that every command has may stand before the command's name, too."""
    for name in ("config", "state_dir"):
        if given.text(name):
            setattr(invocation, name, Path(given.text(name)))
    if given.text("output"):
        invocation.output = given.text("output")
    if given.values.get("color") is False:
        invocation.color = False


def _show(invocation: Invocation, plan: RunPlan, notes: Sequence[str], wrong: Sequence[str]) -> int:
    print_record(invocation, "run_plan", record(plan), name="job")
    for note in notes:
        say(f"note: {note}")
    for line in wrong:
        say(f"refused: {line}")
    return Exit.USAGE if wrong else Exit.OK
