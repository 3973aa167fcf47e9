"""The programs for Prolog and Epilog of Slurm: check the node before and after a job."""

import syslog
from collections.abc import Sequence

from everstep.errors import EverstepError
from everstep.runtime import one_line
from everstep_services.agent.probes.reports import human
from everstep_services.agent.probes.verdicts import code_of
from everstep_services.agent.ranks.process_tree import kill_leftovers
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.node_checks import examined
from everstep_services.cli.output import say

FIT, DRAINED = 0, 1
"""Slurm drains the node of a prolog or epilog that exits with anything but 0."""
_FAILED = 2


def before_job(invocation: Invocation, names: Sequence[str], within_s: float) -> int:
    """Check the node; return the exit code of the prolog."""
    return _check(invocation, "prolog", names, within_s)


def after_job(invocation: Invocation, names: Sequence[str], within_s: float) -> int:
    """Kill what dead agents have left, and check the node; return the exit code of the epilog."""
    killed = kill_leftovers()
    if killed:
        _log("epilog", f"{killed} processes of dead agents were left, and are killed")
    return _check(invocation, "epilog", names, within_s)


def _check(invocation: Invocation, name: str, checks: Sequence[str], within_s: float) -> int:
    try:
        node, examination = examined(invocation, checks, within_s)
    except EverstepError as error:  # a typing error must not drain a whole cluster
        report_unchecked(name, one_line(error))
        return FIT
    for line in human(node, examination, quiet=True):
        _log(name, line)
    return DRAINED if code_of(examination.state) == _FAILED else FIT


def report_unchecked(name: str, why: str) -> None:
    """Report that no check ran, on stderr and in the system's log."""
    _log(name, f"this node was not checked: {why}")


def _log(name: str, text: str) -> None:
    say(f"everstep {name}: {text}")
    syslog.openlog(f"everstep-{name}")
    syslog.syslog(syslog.LOG_WARNING, text)
