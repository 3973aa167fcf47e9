"""Read the command line, make the plan, and either show it or hand it to the agent."""

import asyncio
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.bus.auth.login import Login
from everstep.bus.errors import BusConfigError
from everstep.bus.settings import BusSettings
from everstep.observe.redaction import redact_words
from everstep.settings import shown
from everstep_services.agent.run_plan import RunPlan
from everstep_services.cli.errors import Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_record, say
from everstep_services.cli.run.arguments import Given, UsageError, scan
from everstep_services.cli.run.console_choice import said
from everstep_services.cli.run.environment import address_towards, is_elsewhere
from everstep_services.cli.run.interfaces import interfaces, judge, likely_devices
from everstep_services.cli.run.plan import plan_run

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
    if wrong:
        return Exit.USAGE
    return Exit.OK if plan.bus is None else _try_bus(plan.bus)


def _try_bus(settings: BusSettings) -> int:
    """Connect as an agent would; the exit code with which the run would end at once, or 0."""
    from everstep.bus import connect
    from everstep.bus.errors import BusDeniedError, BusError
    from everstep_services.agent.runtime.main import UNREACHABLE

    async def attempt() -> None:
        async with connect(settings, "check"):
            pass

    try:
        asyncio.run(attempt())
    except BusError as error:
        say(f"refused: {error}")
        return Exit.USAGE if isinstance(error, BusDeniedError) else UNREACHABLE
    return Exit.OK


def objections(plan: RunPlan) -> Iterator[str]:
    """Each thing on this node for which no rank could run. Empty: it may start."""
    command = plan.command
    if command.kind == "script":
        yield from _about_script(Path(command.target))
    elif command.kind == "module":
        if not _is_module(command.target, Path()):
            yield f"there is no module {command.target}, neither here nor installed"
    elif shutil.which(command.target) is None:
        yield f"there is no program {command.target} that may be executed"
    if command.python and shutil.which(command.python) is None:
        yield f"there is no interpreter {command.python}: correct PYTHON_EXEC"
    yield from _about_preload(plan)
    yield from _about_folders(plan)
    yield from _about_address(plan)
    if plan.bus is not None:
        try:
            Login(plan.bus).options()
        except BusConfigError as error:
            yield str(error)


def _about_preload(plan: RunPlan) -> Iterator[str]:
    if not plan.warm or plan.preload == "auto":
        return
    folder = Path(plan.command.target).parent if plan.command.kind == "script" else Path()
    for name in plan.preload:
        if name != "auto" and not _is_module(name, folder):
            yield (
                f"--preload {name}: there is no such module, neither next to the script nor "
                f"installed: correct the name, or leave it out"
            )


def _is_module(name: str, folder: Path) -> bool:
    """Whether a module's outermost package is installed or in a folder; nothing is imported."""
    top = name.partition(".")[0]
    try:
        is_installed = importlib.util.find_spec(top) is not None
    except ValueError:  # for instance of an empty name
        is_installed = False
    return is_installed or (folder / top).is_dir() or (folder / f"{top}.py").is_file()


def _about_folders(plan: RunPlan) -> Iterator[str]:
    folders = [(plan.state_dir, "--state-dir")]
    if not plan.log_dir.is_relative_to(plan.state_dir):
        folders.append((plan.log_dir, "--log-dir"))
    for folder, option in folders:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not _holds_folders(place):
            yield f"nothing can be written to {place}: choose another place with {option}"


def _holds_folders(place: Path) -> bool:
    """Whether a folder can be made there: permissions tell nothing of `/proc`, nor to root."""
    try:
        Path(tempfile.mkdtemp(dir=place)).rmdir()
    except OSError:
        return False
    return True


def _about_address(plan: RunPlan) -> Iterator[str]:
    if is_elsewhere(plan.address):
        bus_side = "" if plan.bus is None else f" ({address_towards(plan.bus.url)})"
        yield (
            f"no interface of this host has the address {plan.address}, so ranks would not "
            f"find each other there: name one with --address that `ip address` shows, or leave it "
            f"out for the one that reaches the bus{bus_side}"
        )


def record(plan: RunPlan) -> dict[str, Any]:
    """The plan in the order in which a person asks."""
    spec = plan.spec
    limits = {
        "in all": spec.max_restarts,
        "an hour": spec.max_restarts_per_hour,
        "rounds without progress": spec.no_progress_limit,
    }
    fields: dict[str, Any] = {
        "job": plan.job,
        "command": " ".join([*_interpreter(plan), *spec.command]),
        "nodes": _nodes(plan),
        "ranks_per_node": spec.ranks_per_node,
        "bus": _bus(plan),
        "node": plan.node,
        "infra_rank": plan.infra_rank,
        "domain": plan.domain,
        "topology": "/".join(plan.topology),
        **({"group": plan.group} if plan.group else {}),
        "address": plan.address,
        "allocation": plan.allocation,
        "scheduler": _scheduler(plan),
        "start": _start(plan),
        "restarts": ", ".join(f"{limit} {what}" for what, limit in limits.items()
                              if limit is not None) or "no limit",
        "on_repeat": "stop" if "stop" in spec.enforce else "advise",
        "stop_grace": f"{plan.agent.stop_grace_s:g} s",
        "preempt_grace": f"{plan.agent.preempt_grace_s:g} s",
        "logs": str(plan.log_dir / plan.job),
        "console": said(plan.console),
        "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()),
        "fingerprint": spec.config_fingerprint,
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value not in {None, ""}}


def _about_script(path: Path) -> Iterator[str]:
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            yield f"{path} is a folder without a __main__.py: name the script in it"
    elif not path.exists():
        hint = "" if path.suffix else "; a module needs -m, another program --no-python"
        yield f"there is no script {path} in {Path.cwd()}{hint}"
    elif not path.is_file():
        yield f"{path} is not a regular file: name the script"
    elif not os.access(path, os.R_OK):
        yield f"the script {path} cannot be read by this user"


def _interpreter(plan: RunPlan) -> list[str]:
    if plan.command.kind == "program":
        return []
    return [
        *redact_words([plan.command.python]),
        *(["-m"] if plan.command.kind == "module" else []),
    ]


def _nodes(plan: RunPlan) -> str:
    spec = plan.spec
    text = str(spec.nodes_max)
    if spec.nodes_min != spec.nodes_max:
        text = f"{spec.nodes_min} to {spec.nodes_max}"
        if spec.slots_per_unit > 1:
            text += f", by {spec.slots_per_unit}"
    if spec.slots_per_segment > 1:
        text += f", in segments of {spec.slots_per_segment}"
    if spec.slots_per_group > 1:
        text += f", replaced in groups of {spec.slots_per_group}"
    return f"{text}, and {spec.spares} spare" if spec.spares else text


def _bus(plan: RunPlan) -> str:
    if plan.bus is not None:
        return shown("bus.url", plan.bus.url)
    return "inside this process" if plan.standalone else f"that of everstep up on {plan.state_dir}"


def _scheduler(plan: RunPlan) -> str:
    scheduler = plan.scheduler
    again = f", requeued {scheduler.attempt} times" if scheduler.attempt else ""
    return "" if scheduler.name == "none" else f"{scheduler.name} {scheduler.job}{again}"


def _start(plan: RunPlan) -> str:
    if not plan.warm:
        return "cold"
    if plan.preload == "auto":
        return "warm: torch and what the script imports"
    return "warm: " + " ".join(["torch", *plan.preload])
