"""The environment and the options that all commands share, before or after their names."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from everstep.settings import Flag, Loaded, Settings
    from everstep_services.cli.api.client import Api


class NumberRange(click.FloatRange):
    """A range of numbers; "not a number" compares with no bound, and is refused here."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return number


class NameType(click.types.StringParamType):
    """A name of a job, a node or the like; an empty one, as of an unset variable, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = str(super().convert(value, param, ctx))
        if param is not None and not name.strip():
            option = param.opts[0] if isinstance(param, click.Option) else ""
            label = option or param.human_readable_name.strip("[].")
            otherwise = "" if param.required else ", or leave it out"
            raise click.UsageError(f"{label} is empty: give it a name{otherwise}", ctx)
        return name


NAME = NameType()
FORMATS = ("table", "json", "jsonl", "name")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(slots=True)
class Invocation:
    """One run of the program. The options may stand before the command's name or after it."""

    environ: Mapping[str, str] = field(default_factory=dict)
    config: Path | None = None
    output: str | None = None
    color: bool = True
    state_dir: Path | None = None
    api: str | None = None
    token_file: Path | None = None
    timeout_s: float | None = None
    keys: Path | None = None
    """The folder with the operator's key, where a command was given one."""

    def load(
        self, sections: "Mapping[str, type[Settings]]", flags: "Iterable[Flag]" = ()
    ) -> "Loaded":
        """These sections of the settings, by all their layers."""
        from everstep.settings import config_files, load

        files = config_files(self.environ, self.config)
        return load(sections, files=files, environ=self.environ, flags=flags)

    def open_api(self) -> "Api":
        """A client for the API of a service; exit code 4 when none is known."""
        from everstep_services.cli.api.location import open_api

        return open_api(self)

    def open_record(self) -> "Api":
        """A client for the API, or, when none is known, for the record on disk of the last run."""
        from everstep_services.cli.api.location import open_record

        return open_record(self)


def _remembered(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
        del param
        if value is not None:
            setattr(ctx.ensure_object(Invocation), name, value)

    return remember


def _option(*names: str, to: str, **rest: Any) -> Decorator:
    return click.option(*names, expose_value=False, callback=_remembered(to), **rest)


_COMMON = (
    _option("--config", to="config", type=click.Path(path_type=Path), metavar="FILE",
            help="Read this settings file only."),
    _option("--no-color", to="color", is_flag=True, flag_value=False, default=None,
            help="No colour, also on a terminal."),
    _option("--state-dir", to="state_dir", type=click.Path(path_type=Path), metavar="DIR",
            help="Where `everstep up` keeps its data."),
)  # fmt: skip
_API = (
    _option("--api", to="api", type=NAME, metavar="URL", help="Where the API is."),
    _option("--token-file", to="token_file", type=click.Path(path_type=Path), metavar="FILE",
            help="The file that holds the API token."),
    _option("--timeout", to="timeout_s", type=NumberRange(min=0, min_open=True),
            metavar="SECONDS", help="How long one answer may take (30)."),
)  # fmt: skip


def with_formats(formats: Sequence[str], text: str, *others: Decorator) -> Decorator:
    """Give a command the common options and some more, and the `Invocation` as its first argument.

    `text` is the help of its formats.
    """
    output = _option("-o", "--output", to="output", type=click.Choice(formats), help=text)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        decorated: Callable[..., Any] = click.pass_obj(command)
        for option in reversed((_COMMON[0], output, *_COMMON[1:], *others)):
            decorated = option(decorated)
        return decorated

    return decorate


def with_api_formats(formats: Sequence[str], text: str) -> Decorator:
    """Give a command the options of those that talk to the API, with formats of its own."""
    return with_formats(formats, text, *_API)


_LISTS = "tab-separated lines elsewhere."
with_common_options = with_formats(FORMATS, f"How to print; a table on a terminal, {_LISTS}")
"""Gives a command the options that every command has."""
with_api_options = with_api_formats(FORMATS, f"How to print; a table on a terminal, {_LISTS}")
"""Gives a command the options of those that talk to the API."""
with_wide_api_options = with_api_formats(
    (*FORMATS, "wide"), f"How to print; a table on a terminal, wide for more of it, {_LISTS}"
)
"""Gives a command the same options; `-o wide` shows more columns."""
