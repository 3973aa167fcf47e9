"""Run a training script on one node or many, and start it again when something dies."""

from __future__ import annotations

import shutil

import click

from everstep_services.cli.invocation import Invocation
from everstep_services.cli.run import help_page
from everstep_services.cli.run.options import OPTIONS, RunOption


class RunCommand(click.Command):
    """Takes its words as torchrun would, which click cannot; click only knows of the options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            ctx.params["words"] = tuple(args)
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        del ctx
        return [help_page.USAGE]


def _known_to_click(option: RunOption) -> click.Option:
    is_flag = option.kind == "flag"
    return click.Option(
        [*option.names, option.to.replace(">", "_to_") + f"_{option.long[2:].replace('-', '_')}"],
        is_flag=is_flag,
        metavar=None if is_flag else option.metavar,
        help=option.help,
        expose_value=False,
        hidden=option.long == "--help",
    )


def _run(words: tuple[str, ...]) -> int:
    """Run a training script with one process for each rank.

    When a rank, an agent or a node dies, all ranks are started again. Takes torchrun's options
    and PET_* variables with the same meaning. What follows SCRIPT belongs to it.
    """
    invocation = click.get_current_context().ensure_object(Invocation)
    if help_page.is_wanted(words):
        click.echo(help_page.page(shutil.get_terminal_size().columns))
        return 0
    from everstep_services.cli.run.start import start

    return start(invocation, words)


command = RunCommand(
    "run",
    params=[_known_to_click(option) for option in OPTIONS],
    callback=_run,
    help=_run.__doc__,
    add_help_option=False,
)
