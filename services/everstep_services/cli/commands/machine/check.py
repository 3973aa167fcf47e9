"""Examine this node: GPUs, network, storage, host, and checks of your own."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from everstep.messages.facts.health import CheckResult
from everstep.settings import read_secret, remember_secret
from everstep_services.agent.probes import notes, registry, reports
from everstep_services.agent.probes.network import pair_test
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination, code_of
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.cells import aligned
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation, NumberRange, with_formats
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.output import echo, print_json, say, schema
from everstep_services.cli.run.safe_names import node_id

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
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "wants_all", is_flag=True, help="Also what takes something from ranks.")
@click.option("--list", "wants_list", is_flag=True, help="Only say which checks there are.")
@click.option(
    "--within",
    "within_s",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long all of it may take.",
)
@click.option("--quiet", is_flag=True, help="Print only what is amiss.")
@click.option(
    "--listen",
    is_flag=False,
    flag_value="127.0.0.1:0",
    metavar="[HOST:PORT]",
    help="With network: let one peer measure the way to this node.",
)
@click.option(
    "--peer", metavar="HOST:PORT", help="With network: measure the way to one that listens there."
)
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With network: the secret that both know, else $EVERSTEP_CHECK_TOKEN.",
)
@with_formats(_FORMATS, "How to print; human unless told otherwise.")
@click.pass_obj
def command(invocation: Invocation, /, **options: Any) -> int:
    """Examine this node, and say what is amiss, with the remedy.

    Without a name it runs all checks that may run during a training. Needs no bus, no settings
    file and no torch. What the node does not have is unsupported, which is fine. `-o` is one of
    human, json, nagios and prometheus.

    Exit codes, as Nagios has them: 0 ok, 1 warning, 2 failed, 3 unknown. Wrong usage and wrong
    settings are 3, too.
    """
    from everstep.errors import EverstepError
    from everstep.runtime import one_line
    from everstep_services.cli.output import say

    try:
        return check(invocation, CheckOptions(**options))
    except EverstepError as error:
        say(f"everstep: {one_line(error)}")
        return _UNKNOWN


_TOKEN = "EVERSTEP_CHECK_TOKEN"  # noqa: S105  the name of the variable


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of the command line."""

    names: tuple[str, ...]
    wants_all: bool
    wants_list: bool
    within_s: float | None
    quiet: bool
    listen: str | None
    peer: str | None
    secret_file: Path | None

    @property
    def is_measurement(self) -> bool:
        """One end of a measurement of the network, instead of an examination of this node."""
        given = (self.listen, self.peer, self.secret_file)
        return pair_test.NAME in self.names or any(option is not None for option in given)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where this runs."""

    node: str
    state_dir: Path
    settings: ChecksSettings


def check(invocation: Invocation, wanted: CheckOptions) -> int:
    """Run the checks and print the results; the exit code is that of Nagios."""
    place = _place(invocation)
    if wanted.wants_list:
        _list(invocation, place.settings)
        return 0
    if wanted.is_measurement:
        done = _measured(wanted, place.settings, invocation.environ)
    else:
        done = _examined(wanted, place)
    _print(invocation.output, place.node, done, quiet=wanted.quiet)
    return code_of(done.state)


def _place(invocation: Invocation) -> Surroundings:
    """By the settings, if there are any. A prolog may run as a user who has no home."""
    environ = invocation.environ
    if not environ.get("HOME"):
        try:
            Path.home()
        except RuntimeError:
            environ = {**environ, "HOME": "/"}
    here = dataclasses.replace(invocation, environ=environ)
    loaded = here.load({"checks": ChecksSettings, "agent": AgentSettings})
    agent, settings = loaded.section(AgentSettings), loaded.section(ChecksSettings)
    state_dir = find_state_dir(environ, invocation.state_dir).path
    own = (state_dir, agent.log_dir or state_dir / "logs")
    return Surroundings(
        node=agent.node_id or node_id(environ),
        state_dir=state_dir,
        settings=msgspec.structs.replace(settings, room_paths=(*own, *settings.room_paths)),
    )


def _examined(wanted: CheckOptions, place: Surroundings) -> NodeExamination:
    if wanted.wants_all and wanted.names:
        raise CliError(f"--all runs every check: leave out {wanted.names[0]}", Exit.USAGE)
    settings = place.settings
    usual = registry.all_names if wanted.wants_all else registry.beside_training
    names = registry.chosen(wanted.names, settings) or usual(settings)
    examiner = NodeExaminer(settings, notes.place(place.state_dir, place.node))
    return asyncio.run(examiner.examine(names, "operator", within_s=wanted.within_s))


def _measured(
    wanted: CheckOptions, settings: ChecksSettings, environ: Mapping[str, str]
) -> NodeExamination:
    is_one_end = (wanted.listen is None) != (wanted.peer is None)
    if wanted.names != (pair_test.NAME,) or wanted.wants_all or not is_one_end:
        text = "the network is measured between two nodes: everstep check network --listen "
        text += "HOST:PORT on one, --peer HOST:PORT on the other; between all nodes of a job: "
        raise CliError(f"{text}everstep network JOB", Exit.USAGE)
    at = pair_test.read_address(wanted.peer or wanted.listen or "")
    token = _token(environ, wanted.secret_file)
    end = _listen if wanted.peer is None else _measure
    within_s = wanted.within_s or settings.all_within_s
    began = time.monotonic()
    try:
        result = asyncio.run(end(at, token, settings, within_s))
    except pair_test.NetworkCheckError as error:
        result = CheckResult(
            check=pair_test.NAME, state="unknown", subject=str(at), reason=str(error)
        )
    took_s = round(time.monotonic() - began, 3)
    return NodeExamination("operator", (pair_test.NAME,), (result,), took_s)


async def _listen(
    at: pair_test.Address, token: bytes, settings: ChecksSettings, within_s: float
) -> CheckResult:
    del settings  # the peer judges

    def ready(at: pair_test.Address) -> None:
        say(f"listening on {at}")

    peer = await pair_test.listen(at, token, within_s=within_s, ready=ready)
    return CheckResult(
        check=pair_test.NAME, state="ok", subject=peer.host, reason="it has measured the way here"
    )


async def _measure(
    to: pair_test.Address, token: bytes, settings: ChecksSettings, within_s: float
) -> CheckResult:
    figures = await pair_test.measure(to, token, within_s=within_s)
    return pair_test.judge(str(to), figures, settings)


def _token(environ: Mapping[str, str], file: Path | None) -> bytes:
    if file is not None:
        return pair_test.read_token(read_secret(file))
    if not environ.get(_TOKEN):
        fix = "give both ends the same --secret-file, made by: openssl rand -hex 32"
        raise CliError(f"no token: {fix}; or set {_TOKEN}", Exit.USAGE)
    remember_secret(environ[_TOKEN])
    return pair_test.read_token(environ[_TOKEN])


def _list(invocation: Invocation, settings: ChecksSettings) -> None:
    own = [name for name in registry.all_names(settings) if name != registry.SITE]
    probes = [*(registry.find(name, settings) for name in own), *registry.site_probes(settings)]
    if invocation.output == "json":
        items = [
            {"name": probe.name, "about": probe.about, "beside_training": probe.beside_training}
            for probe in probes
        ]
        print_json({"schema": schema("check_name"), "items": items})
        return
    rows = (
        (probe.name, f"{probe.about}{'' if probe.beside_training else ' (not during a training)'}")
        for probe in probes
    )
    for line in aligned(rows, indent=0):
        echo(line)


def _print(output: str | None, node: str, done: NodeExamination, *, quiet: bool) -> None:
    match output:
        case "json" | "jsonl":
            print_json(reports.document(node, done))
        case "nagios":
            echo("\n".join(reports.nagios(node, done)))
        case "prometheus":
            echo("\n".join(reports.prometheus(node, done)))
        case _:
            for line in reports.human(node, done, quiet=quiet):
                echo(line)
