"""Examine this node: GPUs, network, storage, host, and checks of your own."""

from pathlib import Path
from typing import Any

import click

from everstep_services.cli.invocation import NAME, Invocation, NumberRange, with_formats

_FORMATS = ("human", "json", "nagios", "prometheus")
_UNKNOWN = 3


class _MisusedError(click.UsageError):
    """Wrong usage is unknown: as 2 it would read as a node that has failed."""

    exit_code = _UNKNOWN


class _CheckCommand(click.Command):
    """Tells wrong usage by the code that the command has for it."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _MisusedError(error.format_message(), error.ctx) from error


@click.command(cls=_CheckCommand)
@click.argument("names", type=NAME, nargs=-1, metavar="[NAME]...")
@click.option("--all", "wants_all", is_flag=True, help="Also run checks that disturb ranks.")
@click.option("--list", "wants_list", is_flag=True, help="Only list the checks.")
@click.option(
    "--within",
    "within_s",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long all checks together may take.",
)
@click.option("--quiet", is_flag=True, help="Print problems only.")
@click.option(
    "--listen",
    is_flag=False,
    flag_value="127.0.0.1:0",
    metavar="[HOST:PORT]",
    help="With network: wait until one peer has measured the connection to this node.",
)
@click.option(
    "--peer",
    metavar="HOST:PORT",
    help="With network: measure the connection to a node that listens there.",
)
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With network: the file with the secret of both nodes; without it, $EVERSTEP_CHECK_TOKEN.",
)
@click.option(
    "--over",
    type=click.Choice(("gloo", "nccl")),
    help="With network: both nodes also add tensors over this backend of torch, as ranks would.",
)
@with_formats(_FORMATS, "How to print (human).")
def command(invocation: Invocation, /, **options: Any) -> int:
    """Examine this node, and print each problem with its remedy.

    Without a name it runs all checks that may run during a training. Needs no bus, no settings
    file and no torch. A part that the node does not have is unsupported, which is not a problem.
    `-o` is one of human, json, nagios and prometheus.

    Exit codes, as Nagios has them: 0 ok, 1 warning, 2 failed, 3 unknown. Wrong usage and wrong
    settings are 3, too.
    """
    from everstep.errors import EverstepError
    from everstep.runtime import one_line
    from everstep_services.cli.machine.node_checks import CheckOptions, check
    from everstep_services.cli.output import say

    try:
        return check(invocation, CheckOptions(**options))
    except EverstepError as error:
        say(f"everstep: {one_line(error)}")
        return _UNKNOWN
