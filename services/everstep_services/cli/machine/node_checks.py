"""`everstep check`: examines this node, measures the network, or lists the checks."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep.settings import read_secret, remember_secret
from everstep_services.agent.probes import notes, registry, reports
from everstep_services.agent.probes.network import collectives, pair_test
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination, code_of
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.cells import aligned
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.output import echo, print_json, say, schema
from everstep_services.cli.run.safe_names import node_id

_TOKEN = "EVERSTEP_CHECK_TOKEN"  # noqa: S105  the name of the variable


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of the command line."""

    names: tuple[str, ...]
    wants_all: bool = False
    wants_list: bool = False
    within_s: float | None = None
    quiet: bool = False
    listen: str | None = None
    peer: str | None = None
    secret_file: Path | None = None
    over: str | None = None

    @property
    def is_measurement(self) -> bool:
        """One end of a measurement of the network, instead of an examination of this node."""
        given = (self.listen, self.peer, self.secret_file, self.over)
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


def examined(
    invocation: Invocation, names: Sequence[str], within_s: float
) -> tuple[str, NodeExamination]:
    """The node, and the results of these checks, or of all that may run during a training."""
    place, wanted = _place(invocation), CheckOptions(names=tuple(names), within_s=within_s)
    return place.node, _examined(wanted, place)


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
        result = asyncio.run(end(at, token, settings, within_s, wanted.over))
    except pair_test.NetworkCheckError as error:
        result = CheckResult(
            check=pair_test.NAME, state="unknown", subject=str(at), reason=str(error)
        )
    took_s = round(time.monotonic() - began, 3)
    return NodeExamination("operator", (pair_test.NAME,), (result,), took_s)


async def _listen(
    at: pair_test.Address, token: bytes, settings: ChecksSettings, within_s: float, over: str | None
) -> CheckResult:
    meeting = at

    def ready(at: pair_test.Address) -> None:
        nonlocal meeting
        meeting = at
        say(f"listening on {at}")

    peer = await pair_test.listen(at, token, within_s=within_s, ready=ready)
    if over is not None:
        return await collectives.compare(meeting, over, settings, within_s, is_peer=False)
    return CheckResult(
        check=pair_test.NAME, state="ok", subject=peer.host, reason="it has measured the way here"
    )


async def _measure(
    to: pair_test.Address, token: bytes, settings: ChecksSettings, within_s: float, over: str | None
) -> CheckResult:
    figures = await pair_test.measure(to, token, within_s=within_s)
    if over is not None:
        return await collectives.compare(to, over, settings, within_s, is_peer=True)
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
