"""Groups of commands. Commands are found by looking into `commands/`: help imports none."""

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep import __version__
from everstep_services.cli.invocation import Invocation, with_common_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = Path(__file__).parent / "commands"
_PACKAGE = "everstep_services.cli.commands"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Start": ("run", "up", "down", "demo", "open", "slurm", "kubernetes"),
    "Look": (
        *("jobs", "job", "ranks", "logs", "why", "incidents", "incident", "stragglers"),
        *("numerics", "goodput", "ckpt", "nodes", "node", "facts", "status"),
    ),
    "Act": (
        *("save", "stop", "restart", "drain", "capture", "network", "inject"),
        *("limits", "control", "brake"),
    ),
    "Site": (
        *("bus", "token", "notify", "config", "env", "check", "doctor", "mcp", "completion"),
        "version",
    ),
    "Offline": ("plan", "export", "serve", "fr", "stacks"),
}
"""The commands by what people want, in the order of `everstep --help`."""


@cache
def command_files() -> Mapping[str, Path]:
    """The file of each command, by the command's name, in alphabetical order."""
    files = (path for path in COMMANDS.glob("*/*.py") if not path.name.startswith("_"))
    return dict(sorted((path.stem.replace("_", "-"), path) for path in files))


class CommandFolder(click.Group):
    """A group whose commands are the files of folders, each imported when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(command_files())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        file = command_files().get(cmd_name)
        if file is None:
            return None
        module = importlib.import_module(f"{_PACKAGE}.{file.parent.name}.{file.stem}")
        command: click.Command = module.command
        command.name = cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names:
            raise click.UsageError(f"no command {args[0]!r}{_did_you_mean(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        width = max(map(len, command_files()))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), summary(name)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        return [
            *(
                CompletionItem(name, help=summary(name))
                for name in self.list_commands(ctx)
                if name.startswith(incomplete)
            ),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]


class ShowGroup(click.Group):
    """A group whose first word may be a name, or an option, or missing: then `show` is meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["show", *args]
        return super().parse_args(ctx, args)


def summary(name: str) -> str:
    """The one-line help of a command: the first line of its file."""
    with command_files()[name].open(encoding="utf-8") as file:
        return file.readline().strip().strip('"').rstrip(".")


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@click.group(cls=CommandFolder, context_settings={"help_option_names": ["-h", "--help"]})
@with_common_options
@click.version_option(__version__, message="everstep %(version)s")
def everstep(_invocation: Invocation) -> None:
    """Keep distributed PyTorch training stepping."""
