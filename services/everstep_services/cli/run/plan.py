"""Makes the plan from options, settings, the environment and defaults, in this order."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from everstep.bus.settings import BusSettings
from everstep.ids import BadNameError, checked_name, new_id
from everstep.messages.base import shared
from everstep.messages.facts.jobs import JobSpec
from everstep.observe.redaction import redact_words
from everstep.observe.settings import ObserveSettings
from everstep.settings import DEFAULT, Flag, Loaded
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.ranks.cpu_affinity import CpuBinding
from everstep_services.agent.ranks.cpu_affinity import here as bindings_here
from everstep_services.agent.replicas.local_root import check_local_root
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.run_plan import RunPlan, Scheduler, ScriptCommand
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import StateDir, find_state_dir
from everstep_services.cli.run import environment
from everstep_services.cli.run.arguments import Given, UsageError
from everstep_services.cli.run.compatibility import apply_rdzv_conf, nodes_of, notes_of
from everstep_services.cli.run.console_choice import console_choice
from everstep_services.cli.run.fingerprint import fingerprint
from everstep_services.cli.run.limit_rules import limits_of
from everstep_services.cli.run.options import WORDS_FOR_NONE
from everstep_services.cli.run.rank_count import count_ranks
from everstep_services.cli.run.replacement_group import check_groups, replacement_group
from everstep_services.cli.run.safe_names import node_id, safe_name

_BUS_FLAGS = {
    "--bus-url": ("bus_url", "bus.url"),
    "--bus-user": ("bus_user", "bus.user"),
    "--bus-password-file": ("bus_password_file", "bus.password_file"),
    "--bus-credentials-file": ("bus_credentials_file", "bus.credentials_file"),
}
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def plan_run(invocation: Invocation, given: Given) -> RunPlan:
    """The plan for the given options. Raises one-line errors; starts and makes nothing."""
    environ = invocation.environ
    apply_rdzv_conf(given)
    bus, loaded = _bus(invocation, given)
    agent = _with_given(loaded.section(AgentSettings), given)
    command = _command(given, environ)
    scheduler = environment.scheduler_of(environ)
    spec, job = _spec(given, agent, command, scheduler, environ)
    state = find_state_dir(environ, invocation.state_dir)
    if given.has("standalone"):
        bus = None
    standalone = _is_standalone(given, spec, bus, state)
    if not given.text("node_id") and agent.node_id is None:
        environment.refuse_crowds(environ)
    node = given.text("node_id") or agent.node_id or node_id(environ)
    is_warm = _is_warm(given, agent, command)
    cpu_bindings, unbound = _cpu_bindings(given, agent, spec.ranks_per_node, environ)
    return RunPlan(
        job=job,
        node=_named("node", node, "--node-id"),
        command=command,
        spec=spec,
        allocation=_allocation_of(given, scheduler),
        scheduler=scheduler,
        address=_address(given, agent, bus),
        bus=bus,
        state_dir=state.path,
        log_dir=_log_dir(given, agent, state.path),
        agent=agent,
        console=replace(console_choice(given, agent, environ), is_colored=invocation.color),
        infra_rank=_infra_rank(given, agent, environ),
        domain=given.text("domain", agent.domain),
        topology=environment.topology(given.text("topology", agent.topology), environ),
        group=_group(given, agent, spec, environ),
        role=given.text("role", "default"),
        run_id=given.text("rdzv_id") or job,
        warm=is_warm,
        preload=_preload(given.text("preload", agent.preload)),
        checks=_checks(given, loaded.section(ChecksSettings), _log_dir(given, agent, state.path)),
        checkpoints=_checkpoints(given, agent),
        limits=limits_of(given, agent),
        traces_url=loaded.section(ObserveSettings).traces_url,
        signals=_signals(given),
        virtual_local_rank=given.has("virtual_local_rank"),
        cpu_bindings=cpu_bindings,
        standalone=standalone,
        leave_children=given.has("leave_children") or agent.leave_children,
        allow_fresh_start=given.has("allow_fresh_start"),
        stand_in=_stand_in(given),
        allow_injection=given.has("allow_injection"),
        notes=(*notes_of(given, environ, spec.ranks_per_node), *unbound),
    )


def _cpu_bindings(
    given: Given, agent: AgentSettings, ranks: int, environ: Mapping[str, str]
) -> tuple[tuple[CpuBinding, ...], tuple[str, ...]]:
    """The CPUs of each rank; where the machine does not allow that, a line that explains why.

    Raises `UsageError` instead, if the binding must hold.
    """
    is_strict = _is_strict(given)
    if agent.numa_binding == "off":
        return (), (_NOTHING_TO_BIND,) if is_strict else ()
    chosen, trouble = bindings_here(agent.numa_binding, ranks, environ)
    if trouble and is_strict:
        raise UsageError(
            f"{trouble}, and {given.origins['numa_strict']} demands it: give false to run without"
        )
    strict = tuple(replace(binding, is_strict=is_strict) for binding in chosen)
    return strict, (trouble,) if trouble else ()


def _is_strict(given: Given) -> bool:
    text = given.text("numa_strict").lower()
    if text in {"true", "1", "yes"}:
        return True
    if text in {"false", "0", "no"} | WORDS_FOR_NONE:
        return False
    raise given.wrong("numa_strict", "give true or false")


_NOTHING_TO_BIND = "--ft-numa-bind-strict is not used without --numa-binding: no rank is bound"


def _stand_in(given: Given) -> Literal["", "missing", "always"]:
    if given.has("replace_nvrx"):
        return "always"
    return "missing" if given.has("as_nvrx") else ""


def _checks(given: Given, settings: ChecksSettings, log_dir: Path) -> ChecksSettings:
    """The space for logs counts, too; the health daemon may be named as for NVRx."""
    import msgspec

    return msgspec.structs.replace(
        settings,
        room_paths=(log_dir, *settings.room_paths),
        daemon=_daemon(given) or settings.daemon,
    )


def _daemon(given: Given) -> Path | None:
    """The socket of the health daemon, with or without the scheme of gRPC."""
    text = given.text("daemon")
    if text.lower() in WORDS_FOR_NONE:
        return None
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/"):
        raise given.wrong("daemon", "give the absolute path of a unix socket, as /run/nvhcd.sock")
    return Path(path)


def _checkpoints(given: Given, agent: AgentSettings) -> CheckpointSettings:
    """Where states are kept is looked at before anything starts."""
    import msgspec

    chosen, settings = given.text("local_root"), agent.checkpoints
    if chosen:
        root = Path(chosen).expanduser().absolute()
        settings = msgspec.structs.replace(settings, local_root=root)
    if settings.local_root is not None:
        check_local_root(settings.local_root)
    return settings


def _bus(invocation: Invocation, given: Given) -> tuple[BusSettings | None, Loaded]:
    """The bus that options or settings name, if any; and all settings."""
    for name, (value, _) in _BUS_FLAGS.items():
        if given.values.get(value) == "":
            raise UsageError(f"{name} is empty: give it a value, or leave the option out")
    flags = [Flag(name, key, given.values.get(value)) for name, (value, key) in _BUS_FLAGS.items()]
    loaded = invocation.load(
        {
            "bus": BusSettings,
            "agent": AgentSettings,
            "checks": ChecksSettings,
            "observe": ObserveSettings,
        },
        flags,
    )
    if any(origin != DEFAULT for key, origin in loaded.origins.items() if key.startswith("bus.")):
        return loaded.section(BusSettings), loaded
    return None, loaded


def _with_given(agent: AgentSettings, given: Given) -> AgentSettings:
    """The settings, with what was given instead of what they say."""
    import msgspec

    names = {field.name for field in msgspec.structs.fields(AgentSettings)}
    grace = given.values.get("shutdown_timeout")
    if grace is not None:
        given.values.setdefault("stop_grace_s", grace)
        given.values.setdefault("preempt_grace_s", grace)
    changes = {
        name: value
        for name, value in given.values.items()
        if name in names and name not in {"log_dir", "console"}
    }
    try:
        return msgspec.structs.replace(agent, **changes)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _command(given: Given, environ: Mapping[str, str]) -> ScriptCommand:
    if not given.script:
        raise UsageError("what shall run? everstep run [options] SCRIPT [arguments]")
    if given.has("module") and given.has("no_python"):
        raise UsageError("-m needs Python, --no-python declines it: drop one of them")
    python = environ.get("PYTHON_EXEC") or sys.executable
    if given.has("module"):
        return ScriptCommand("module", given.script, given.arguments, python)
    if given.has("no_python") and not given.has("run_path"):
        return ScriptCommand("program", given.script, given.arguments)
    return ScriptCommand("script", given.script, given.arguments, python)


def _spec(
    given: Given,
    agent: AgentSettings,
    command: ScriptCommand,
    scheduler: Scheduler,
    environ: Mapping[str, str],
) -> tuple[JobSpec, str]:
    least, most = nodes_of(given)
    ranks, counted = count_ranks(given.text("nproc_per_node", "1"), environ, command.python)
    if counted:
        given.notes.append(f"--nproc-per-node {given.text('nproc_per_node')}: {ranks} {counted}")
    job = _job_of(given, scheduler, most + (given.whole("spares") or 0))
    shown = redact_words([command.target, *command.arguments])
    spec = JobSpec(
        name=given.text("name") or job,
        labels=_labels_of(given),
        command=shown,
        config_fingerprint="",
        nodes_min=least,
        nodes_max=most,
        ranks_per_node=ranks,
        spares=given.whole("spares") or 0,
        slots_per_unit=given.whole("unit") or 1,
        slots_per_segment=_segment(given),
        slots_per_group=given.whole("group_size") or 1,
        **shared(JobSpec, agent),
        enforce=_enforced(agent, given),
    )
    _check_units(spec)
    settings = [f"{name}={getattr(spec, name)}" for name in spec.__struct_fields__]
    hashed = fingerprint(shown, [command.kind, *settings], environ)
    import msgspec

    return msgspec.structs.replace(spec, config_fingerprint=hashed), job


def _segment(given: Given) -> int:
    segment = given.whole("segment")
    if segment is not None and segment < 1:
        raise given.wrong("segment", "a segment has at least one slot")
    return segment or 1


def _group(given: Given, agent: AgentSettings, spec: JobSpec, environ: Mapping[str, str]) -> str:
    """The node's replacement group; empty in a job without such groups."""
    if spec.slots_per_group <= 1:
        return ""
    domain = given.text("domain", agent.domain)
    topology = environment.topology(given.text("topology", agent.topology), environ)
    return replacement_group(given.text("group", agent.group), domain, topology, environ)


def _enforced(agent: AgentSettings, given: Given) -> tuple[str, ...]:
    """The decisions that stop the job instead of only being advised, as requested."""
    rules = ["stop"] if agent.stop_on_repeat else []
    return (*rules, "no_progress") if given.has("no_progress_limit") else tuple(rules)


def _check_units(spec: JobSpec) -> None:
    if spec.slots_per_group > 1 and spec.slots_per_segment > 1:
        raise UsageError(
            f"--segment {spec.slots_per_segment} and --group-size {spec.slots_per_group}: give one "
            f"of them; the slots of a replacement group are a segment, too"
        )
    check_groups(spec.spares, spec.slots_per_group)
    for option, size in (
        ("--unit", spec.slots_per_unit),
        ("--segment", spec.slots_per_segment),
        ("--group-size", spec.slots_per_group),
    ):
        for what, nodes in (("least", spec.nodes_min), ("largest", spec.nodes_max)):
            if nodes % size:
                raise UsageError(
                    f"{option} {size}: the {what} number of nodes, {nodes}, is not a multiple of "
                    f"it; change --nnodes or {option}"
                )


def _is_standalone(given: Given, spec: JobSpec, bus: BusSettings | None, state: StateDir) -> bool:
    """Whether bus and services run in this process: when asked to, or when there is no other."""
    nodes = spec.nodes_max + spec.spares
    if given.has("standalone"):
        if nodes > 1:
            raise UsageError(
                f"--standalone is for one node, but {nodes} are asked for: leave it out, and name "
                f"a bus with --bus-url or under [bus]"
            )
        return True
    if bus is not None:
        return False
    running = state.running_at_last()
    if running is not None and running.command == "up":
        return False
    if nodes > 1:
        raise UsageError(
            f"{nodes} nodes need a bus to meet on, and none is known: start one with `everstep "
            f"up`, then name it on each node with --bus-url URL, EVERSTEP_BUS__URL or under [bus]"
        )
    return True


def _address(given: Given, agent: AgentSettings, bus: BusSettings | None) -> str:
    chosen = given.text("address") or given.text("local_addr") or agent.address
    if chosen:
        environment.check_resolves(chosen)
        return chosen
    return "127.0.0.1" if bus is None else environment.address_towards(bus.url)


def _log_dir(given: Given, agent: AgentSettings, state: Path) -> Path:
    chosen = given.text("log_dir")
    folder = Path(chosen).expanduser() if chosen else agent.log_dir or state / "logs"
    return folder.absolute()


def _infra_rank(given: Given, agent: AgentSettings, environ: Mapping[str, str]) -> int | None:
    for name in ("infra_rank", "node_rank"):
        if name in given.values:
            return given.whole(name)
    return agent.infra_rank if agent.infra_rank is not None else environment.infra_rank(environ)


def _is_warm(given: Given, agent: AgentSettings, command: ScriptCommand) -> bool:
    if command.kind == "program":
        if given.has("warm"):
            raise UsageError("--warm needs Python, --no-python declines it: drop one of them")
        return False
    if agent.warm and command.python != sys.executable:
        given.notes.append(
            f"ranks start cold: PYTHON_EXEC is {command.python}, and only a process of this "
            f"interpreter can be kept ready"
        )
        return False
    return agent.warm


def _preload(text: str) -> tuple[str, ...] | Literal["auto"]:
    modules = tuple(part.strip() for part in text.split(",") if part.strip())
    if modules == ("auto",):
        return "auto"
    return () if modules == ("none",) else modules


def _signals(given: Given) -> tuple[str, ...]:
    text = given.text("signals_to_handle")
    if not text:
        return _SIGNALS
    names = tuple(part.strip().upper() for part in text.split(",") if part.strip())
    all_names = {number.name for number in signal.Signals}
    for name in names:
        if name not in all_names:
            raise given.wrong("signals_to_handle", f"{name} is not a signal; write SIGTERM,SIGUSR1")
    others = [name for name in names if name not in {*_SIGNALS, "SIGUSR1", "SIGUSR2"}]
    if others:
        given.notes.append(
            f"{', '.join(others)} in {given.origins['signals_to_handle']}: not handled; "
            f"{', '.join(_SIGNALS)}, SIGUSR1 and SIGUSR2 always are"
        )
    return names


def _labels_of(given: Given) -> dict[str, str]:
    """The labels of `--label`."""
    labels: dict[str, str] = {}
    for text in given.repeated.get("label", ()):
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--label {text!r}: write KEY=VALUE, for instance team=vision")
        labels[key.strip()] = value.strip()
    return labels


def _job_of(given: Given, scheduler: Scheduler, nodes: int) -> str:
    """The job's id: as given, else torchrun's run id, else the scheduler's; at last a new one."""
    if given.text("job"):
        return _named("job", given.text("job"), "--job")
    run_id = given.text("rdzv_id")
    if run_id and run_id != "none":
        job = safe_name(run_id, "job")
        was = "" if job == run_id else f" ({run_id!r} holds what no id may)"
        given.notes.append(f"the job is called {job}, by {given.origins['rdzv_id']}{was}")
        return job
    if scheduler.job:
        job = safe_name(f"{scheduler.name}-{scheduler.job}", "job")
        given.notes.append(f"the job is called {job}; --job NAME gives it another id")
        return job
    if nodes > 1:
        raise UsageError(
            f"{nodes} nodes need an id for the job that they share: give the same --job ID on each"
        )
    stem = safe_name(Path(given.script or "").stem, "job")[:40]
    return f"{stem}-{new_id()[-6:]}"


def _named(kind: str, name: str, option: str) -> str:
    """The name itself, when it may name such a thing."""
    try:
        return checked_name(kind, name)
    except BadNameError as error:
        raise UsageError(f"{option}: {error}") from error


def _allocation_of(given: Given, scheduler: Scheduler) -> str:
    """The id of this start: as given, else the scheduler's, else a new one."""
    chosen = given.text("allocation")
    if chosen:
        return _named("allocation", chosen, "--allocation")
    return environment.allocation_id(scheduler)
