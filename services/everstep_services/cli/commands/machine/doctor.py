"""Examine this machine and this cluster, and say how to fix what is wrong."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.output import print_records


@click.command()
@click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder with the operator's key: then each server of the bus is asked, too.",
)
@with_api_options
def command(invocation: Invocation, keys: Path | None) -> int:
    """Examine this machine and this cluster.

    Exit codes: 0 all is well, 1 warnings, 2 something critical, 3 could not find out.
    """
    from everstep_services.cli.machine.doctor import examine, worst

    invocation.keys = keys
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
