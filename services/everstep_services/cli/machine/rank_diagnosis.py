"""The doctor's checks of what ranks meet: network, recorder, limits, clock, disks, launchers."""

import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.host import clock as host_clock
from everstep_services.agent.probes.host import disk_space, flight_recorder
from everstep_services.agent.probes.host import limits as host_limits
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import StallLimits
from everstep_services.agent.stalls.limits_table import external_limits, misorders, time_text
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.run import environment, interfaces
from everstep_services.cli.run.arguments import Given, UsageError
from everstep_services.cli.run.limit_rules import limits_of
from trainer_sdk.nvrx.nccl_check import of_release, troubles
from trainer_sdk.page_content import SectionKind


class Level(IntEnum):
    """As Nagios numbers them; these are the exit codes."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one check found, and what to do about it."""

    check: str
    level: Level
    text: str
    fix: str = ""


Diagnoses = Iterator[Diagnosis]
Check = Callable[[Invocation], Diagnoses]


_LEVELS = {"ok": Level.OK, "unsupported": Level.OK, "warning": Level.WARNING}
_FAILURES = {"failed": Level.CRITICAL, "unknown": Level.UNKNOWN}
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "PET_NNODES", "NNODES")
_HARD_TIMEOUT_S = 90.0
"""The default of `inprocess.Wrapper`."""
_TORCHRUN = ("TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")


def network_interface(invocation: Invocation) -> Diagnoses:
    """Whether gloo and NCCL find an interface that other nodes reach."""
    environ, here = invocation.environ, interfaces.interfaces()
    is_large = _has_several_nodes(environ)
    troubles = [
        Diagnosis("network_interface", Level.CRITICAL if fault.is_sure else Level.WARNING, *_cut(
            fault.text, "correct or unset the variable"))
        for fault in interfaces.judge(environ, lambda: here, interfaces.likely_devices)
    ]  # fmt: skip
    troubles += [_loopback(name, environ[name]) for name in _loops(environ, here) if is_large]
    if not any(environ.get(name) for name in (interfaces.GLOO, interfaces.NCCL)):
        troubles += _host_name(is_large=is_large)
    named = ", ".join(str(interface) for interface in here)
    yield from troubles or [Diagnosis("network_interface", Level.OK, named)]


def _loops(environ: Mapping[str, str], here: list[interfaces.Interface]) -> Iterator[str]:
    loops = {card.name for card in here if card.ipv4 and all(map(_is_loopback, card.ipv4))}
    for variable in (interfaces.GLOO, interfaces.NCCL):
        names = {name.strip("=") for name in environ.get(variable, "").split(",") if name}
        if names and names <= loops:
            yield variable


def _loopback(variable: str, value: str) -> Diagnosis:
    text = f"{variable}={value} is loopback, and this job has several nodes: none reaches another"
    fix = f"name the interface of the network between nodes in {variable}, or unset it"
    return Diagnosis("network_interface", Level.CRITICAL, text, fix)


def _host_name(*, is_large: bool) -> Iterator[Diagnosis]:
    """Where no interface is named, gloo listens where the host's name leads."""
    name = socket.gethostname()
    try:
        places = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        text = f"the name of this host, {name}, leads nowhere; gloo looks for an address by it"
        fix = f"add {name} with this host's address to /etc/hosts, or set {interfaces.GLOO}"
        level = Level.CRITICAL if is_large else Level.WARNING
        yield Diagnosis("network_interface", level, text, fix)
        return
    addresses = sorted({str(place[0]) for *_, place in places})
    if is_large and all(map(_is_loopback, addresses)):
        text = (
            f"the name of this host, {name}, leads to loopback ({', '.join(addresses)}), and this "
            f"job has several nodes: gloo listens where none of the others reaches it"
        )
        fix = f"correct {name} in /etc/hosts, or set {interfaces.GLOO} to an interface"
        yield Diagnosis("network_interface", Level.CRITICAL, text, fix)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _has_several_nodes(environ: Mapping[str, str]) -> bool:
    """Whether a variable of the scheduler or of torchrun counts more than one node."""
    counts = (environ.get(name, "").rpartition(":")[2] for name in _NODES)
    return any(count.isdecimal() and int(count) > 1 for count in counts)


def recorder(invocation: Invocation) -> Diagnoses:
    """Whether collectives are recorded, so that a hang can be explained."""
    is_ours = not any(name in invocation.environ for name in _TORCHRUN)
    yield _of_probe("recorder", flight_recorder.judge(invocation.environ, is_ours=is_ours))


def timeouts(invocation: Invocation) -> Diagnoses:
    """Whether the limit that knows the reason ends a wait before one that does not."""
    agent = invocation.load({"agent": AgentSettings}).section(AgentSettings)
    limits = StallLimits(limits_of(Given(), agent))
    others = external_limits(
        invocation.environ,
        preempt_grace_s=agent.preempt_grace_s,
        scheduler_grace_s=agent.scheduler_grace_s,
        has_nccl=interfaces.likely_devices(),
        limited_by="EVERSTEP_AGENT__LIMITS=",
    )
    troubles = [
        Diagnosis("timeouts", Level.WARNING, *_cut(misorder.text, "see `everstep limits`"))
        for misorder in misorders(limits, others)
        if misorder.is_warning
    ]
    stall = limits.section("", SectionKind.PLAIN)
    is_default = others.is_monitored and stall.source == "default"
    if others.heartbeat_s and is_default and others.heartbeat_s <= stall.s:
        text = (
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={others.heartbeat_s:g} ends a rank before a stall "
            f"is found ({time_text(stall.s)}, {stall.source}), and names no reason"
        )
        fix = f"raise it above {stall.s:g}, or set EVERSTEP_AGENT__LIMITS=outside=SECONDS"
        troubles.append(Diagnosis("timeouts", Level.WARNING, text, fix))
    if agent.stop_grace_s > agent.preempt_grace_s:
        text = (
            f"stop_grace_s ({agent.stop_grace_s:g}) is longer than preempt_grace_s "
            f"({agent.preempt_grace_s:g}): a node that is taken away has less time than a broken "
            f"round"
        )
        fix = "lower stop_grace_s in [agent]: a broken round has nothing to save"
        troubles.append(Diagnosis("timeouts", Level.WARNING, text, fix))
    yield from troubles or [Diagnosis("timeouts", Level.OK, "in an order that names reasons")]


def in_process_restart(invocation: Invocation) -> Diagnoses:
    """Whether NCCL can be aborted and begun again, for scripts with `inprocess.Wrapper`."""
    name = "in_process_restart"
    if not interfaces.likely_devices():
        yield Diagnosis(name, Level.OK, "no GPU: gloo needs nothing for it")
        return
    broken = [Diagnosis(name, Level.WARNING, *_cut(text, "")) for text in of_release(_nccl())]
    wanted = [_cut(text, "")[1] for text in troubles(invocation.environ, None, _HARD_TIMEOUT_S)]
    text = (
        f"a script with inprocess.Wrapper needs more: {'; '.join(wanted)}" if wanted else "set up"
    )
    yield from broken or [Diagnosis(name, Level.OK, text)]


def _nccl() -> tuple[int, ...] | None:
    """The release of NCCL that was installed with torch, without importing torch."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(PackageNotFoundError):
            return tuple(int(part) for part in version(package).split(".")[:3] if part.isdecimal())
    return None


def launchers(invocation: Invocation) -> Diagnoses:
    """Whether another launcher has started this process, once for each rank."""
    environ, troubles = invocation.environ, []
    try:
        environment.refuse_crowds(environ)
    except UsageError as error:
        text, _, fix = str(error).rpartition(": ")
        troubles.append(Diagnosis("launchers", Level.CRITICAL, text, fix))
    rank = next((name for name in _TORCHRUN if name in environ), None)
    if rank is not None:
        text = (
            f"torchrun has started this process as a rank ({rank}={environ[rank][:40]}): "
            f"`everstep run` here would start all ranks once for each rank of torchrun"
        )
        fix = (
            "start `everstep run` in the place of torchrun; to let torchrun start the ranks, open "
            "a session in the script, which an agent then watches (docs/guides/attach.md)"
        )
        troubles.append(Diagnosis("launchers", Level.CRITICAL, text, fix))
    yield from troubles or [Diagnosis("launchers", Level.OK, "no other launcher is around")]


def host(invocation: Invocation) -> Diagnoses:
    """The parts of `everstep check host` that a launch depends on."""
    settings = invocation.load({"checks": ChecksSettings}).section(ChecksSettings)
    state = find_state_dir(invocation.environ, invocation.state_dir).path
    folders = (state, *settings.room_paths)
    look = Look(msgspec.structs.replace(settings, room_paths=folders))
    for name, part in (
        ("kernel_clock", host_clock.kept),
        ("limits", host_limits.limits),
        ("disks", disk_space.folders),
    ):
        try:
            for result in part(look):
                yield _of_probe(name, result)
        except PermissionError as error:
            yield Diagnosis(name, Level.OK, f"cannot be seen from here: {error.strerror}")


def _of_probe(name: str, result: CheckResult) -> Diagnosis:
    level = {**_LEVELS, **_FAILURES}.get(result.state, Level.UNKNOWN)
    about = result.subject if result.subject.startswith("/") else ""
    if level is Level.OK:
        return Diagnosis(name, level, " ".join(filter(None, (about, result.reason or "in order"))))
    text, fix = _cut(result.reason, "`everstep check` shows more")
    return Diagnosis(name, level, f"{about}: {text}" if about else text, fix)


def _cut(reason: str, otherwise: str) -> tuple[str, str]:
    """A sentence and its remedy, which stands behind its last semicolon."""
    text, separator, fix = reason.rpartition("; ")
    return (text, fix) if separator else (reason, otherwise)
