"""Examine this machine and this cluster, and say how to fix what is wrong."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.output import print_records


@click.command()
@with_api_options
@click.pass_obj
def command(invocation: Invocation) -> int:
    """Examine this machine and this cluster.

    Exit codes: 0 all is well, 1 warnings, 2 something critical, 3 could not find out.
    """
    from everstep_services.cli.machine.doctor import examine, worst

    findings = examine(invocation)
    records = [
        {
            "check": finding.check,
            "level": finding.level.name.lower(),
            "text": finding.text,
            "fix": finding.fix,
        }
        for finding in findings
    ]
    print_records(invocation, "finding", records, ["check", "level", "text", "fix"])
    return worst(findings)
