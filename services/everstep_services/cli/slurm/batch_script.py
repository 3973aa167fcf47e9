"""The batch script of a job: one agent on each node, and what follows after its exit code. Pure."""

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from everstep import __version__
from everstep.ids import BadNameError, checked_name
from everstep_services.cli.run.arguments import Given, UsageError
from everstep_services.cli.run.compatibility import nodes_of
from everstep_services.cli.run.replacement_group import check_groups

IN_JOB_RESTARTS = 3
"""Restarts within an allocation; NeMo's launchers have the same default."""
RETRIES = 2
"""Failed allocations in a row after which another one follows; as in NeMo's launchers."""
_SAVE_RESERVE_S = 30
"""Slurm's warning comes this much before the agents' own grace is over."""
_EARLY_S = 60
"""Slurm may send its warning this much earlier than asked."""

ControlPlane = Literal["outside", "inside"]
DrainMode = Literal["off", "observe", "enforce"]
"""Whether Slurm drains a node that Everstep has excluded; `observe` only reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What a script is written for."""

    words: tuple[str, ...]
    """The words after `everstep run`."""
    job: str
    folder: str
    """Absolute, on a file system that all nodes share."""
    time: str = ""
    signal_s: int = 600
    """Slurm's warning, in seconds before the end of the allocation."""
    retries: int = RETRIES
    chain: int = 0
    """The number of allocations of an array that follow each other; 0 to requeue one job."""
    control_plane: ControlPlane = "outside"
    leaves_when_drained: bool = False
    drains_excluded: DrainMode = "off"
    directives: tuple[str, ...] = ()
    """Further options of sbatch, each as in `--partition=gpu`."""
    setup: tuple[str, ...] = ()
    """Shell lines that come first, for example to activate an environment."""
    program: str = "everstep"


def batch_script(request: BatchRequest, given: Given) -> str:
    """The text of the script. Raises `UsageError` for options that contradict each other."""
    _check(request, given)
    _, most = nodes_of(given)
    nodes = most + (given.whole("spares") or 0)
    blocks = [
        _head(request, nodes),
        _surroundings(request),
        _control_plane(request),
        _watcher(request, given),
        _step(request, given),
        _end(request),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def watches_drains(request: BatchRequest, given: Given) -> bool:
    """Whether drained nodes leave: if a node can take their place, or on request."""
    least, most = nodes_of(given)
    if request.drains_excluded != "off":
        return True
    return request.leaves_when_drained or bool(given.whole("spares")) or least < most


def _check(request: BatchRequest, given: Given) -> None:
    if not given.script:
        raise UsageError(
            "which training shall run? everstep slurm sbatch [options] -- "
            "[options of everstep run] SCRIPT [arguments]"
        )
    for name in ("job", "standalone", "infra_rank", "node_rank", "node_id", "allocation"):
        if given.values.get(name):
            raise UsageError(f"{given.origins[name]} after `--`: {_WHY_NOT[name]}")
    _check_time(request)
    _check_folder(request.folder)
    if request.chain == 1:
        raise UsageError("--chain 1: a chain has at least 2 allocations; leave it out to requeue")
    check_groups(given.whole("spares") or 0, given.whole("group_size") or 1)
    grace = given.values.get("preempt_grace_s")
    if isinstance(grace, int | float) and request.signal_s and grace > request.signal_s:
        raise UsageError(
            f"--preempt-grace {grace:g}: Slurm's warning comes {request.signal_s} s before the end "
            f"of the allocation; raise --signal above it"
        )
    for directive in request.directives:
        _check_directive(directive)


def _check_time(request: BatchRequest) -> None:
    if not request.time:
        return
    lasts_s = time_s(request.time)
    if lasts_s is None:
        raise UsageError(
            f"--time {request.time!r}: write minutes, HH:MM:SS or D-HH:MM:SS, for example 04:00:00"
        )
    if request.signal_s and lasts_s <= request.signal_s + _EARLY_S:
        raise UsageError(
            f"--time {request.time}: Slurm's warning, {request.signal_s} s before the end and up "
            f"to {_EARLY_S} s early, would come at the start; lengthen --time or shorten --signal"
        )


def _check_folder(folder: str) -> None:
    """In a directive a path could end the line, or its own quotes, and what follows would run."""
    if wrong := re.search(r"""["'\\\x00-\x1f\x7f\x85\u2028\u2029]""", folder):
        raise UsageError(
            f"--folder {folder!r}: Slurm cannot read {wrong[0]!r} in the path of the output; name "
            f"a folder without quotes, backslashes and control characters"
        )


def time_s(text: str) -> int | None:
    """A time limit of Slurm in seconds; None for anything else.

    Slurm reads M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?", text.strip())
    if match is None:
        return None
    days, *numbers = match.groups()
    parts = [int(number) for number in numbers if number is not None]
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1, 0)
    return int(days or 0) * 86400 + sum(a * b for a, b in zip(parts, units, strict=False))


_WHY_NOT = {
    "job": "name the job before `--`, as --job of `everstep slurm sbatch`",
    "standalone": "leave it out, and use --control-plane inside",
    "infra_rank": "each node has its own from Slurm; leave it out",
    "node_rank": "each node has its own from Slurm; leave it out",
    "node_id": "each node has its own from Slurm; leave it out",
    "allocation": "each allocation has its own from Slurm; leave it out",
}
_OWN_DIRECTIVES = frozenset(
    {
        "--nodes", "--ntasks", "--ntasks-per-node", "--job-name", "--requeue", "--no-requeue",
        "--no-kill", "--signal", "--array", "--time", "--open-mode", "--output",
    }
)  # fmt: skip
_INSTEAD = {
    "--nodes": "it follows from --nnodes and --spares",
    "--ntasks": "a node has one task, its agent",
    "--ntasks-per-node": "a node has one task, its agent",
    "--job-name": "use --job",
    "--signal": "use --signal SECONDS",
    "--array": "use --chain N",
    "--time": "use --time",
    "--output": "use --folder: the output is in it",
}


def _check_directive(directive: str) -> None:
    name = directive.partition("=")[0]
    if "\n" in directive or not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", directive):
        raise UsageError(
            f"--sbatch {directive!r}: write a long option, for example --sbatch=--qos=high"
        )
    if name in _OWN_DIRECTIVES:
        why = _INSTEAD.get(name, "the script depends on it")
        raise UsageError(f"--sbatch {directive!r}: the script has its own {name}; {why}")


def _head(request: BatchRequest, nodes: int) -> str:
    # Paths in directives are not shell words: Slurm reads them as they are, up to a space.
    log = "slurm-%A_%a.out" if request.chain else "slurm-%j.out"
    directives = [
        f"--job-name={request.job}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--no-kill",
        "--open-mode=append",
        f"--output={_directive_path(request.folder)}/{log}",
    ]
    if request.time:
        directives.append(f"--time={request.time}")
    if request.signal_s:
        directives.append(f"--signal=USR1@{request.signal_s}")
    if request.chain:
        directives += ["--no-requeue", f"--array=1-{request.chain}%1"]
    else:
        directives.append("--requeue")
    lines = [
        "#!/bin/bash",
        f"# Job {request.job}, by `everstep slurm sbatch` of Everstep {__version__}.",
        "# Submit it with sbatch. Everything in it may be changed.",
        *(f"#SBATCH {directive}" for directive in (*directives, *request.directives)),
    ]
    return "\n".join(lines)


def _directive_path(folder: str) -> str:
    path = folder.replace("%", "%%")
    return f'"{path}"' if re.search(r"[\s#]", path) else path


def _surroundings(request: BatchRequest) -> str:
    return "\n".join(
        [
            *request.setup,
            f"job={shlex.quote(request.job)}",
            f"folder={shlex.quote(request.folder)}  # on a file system that all nodes share",
            "# Agents leave here how they ended, and find here whether their node must leave.",
            "export EVERSTEP_AGENT__ALLOCATION_DIR="
            "$folder/allocations/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
            'mkdir -p "$EVERSTEP_AGENT__ALLOCATION_DIR" || exit 2',
        ]
    )


def _program(request: BatchRequest) -> str:
    return shlex.quote(request.program)


def _control_plane(request: BatchRequest) -> str:
    if request.control_plane == "outside":
        return (
            "# The bus and the services run outside of the allocation: EVERSTEP_BUS__URL and\n"
            "# EVERSTEP_BUS__CREDENTIALS_FILE, or [bus] in everstep.toml, tell where."
        )
    everstep = _program(request)
    end = shlex.quote(f'{everstep} down --state-dir "$state"')
    return "\n".join(
        [
            "# The bus and the services run on this node, for as long as the allocation.",
            'state="$folder/control-plane"',
            f'{everstep} down --state-dir "$state" 2>/dev/null  # of an allocation that was killed',
            f'{everstep} up --detach --port 0 --bus-host "$(hostname)" --state-dir "$state" '
            "> /dev/null || exit 94",
            f"trap {end} EXIT",
            f'bus=$({everstep} env --job "$job" --state-dir "$state") || exit 94',
            'eval "$bus"',
        ]
    )


def _watcher(request: BatchRequest, given: Given) -> str:
    if not watches_drains(request, given):
        return ""
    mode = request.drains_excluded
    drains = "" if mode == "off" else f" --drain-excluded {mode}"
    return "\n".join(
        [
            "# A node that is drained saves and leaves; a spare takes its place.",
            f"{_program(request)} slurm watch{drains} &",
            "watcher=$!",
        ]
    )


def _step(request: BatchRequest, given: Given) -> str:
    words = [*_defaults(request, given), *request.words]
    ends_watcher = ['kill "$watcher" 2>/dev/null'] if watches_drains(request, given) else []
    return "\n".join(
        [
            "# Slurm's signals are for the agents, which save; this script waits for them.",
            "trap : TERM USR1 USR2",
            "# One agent on each node. A node that is lost or leaves does not end the others,",
            "# whatever WaitTime and KillOnBadExit are in slurm.conf.",
            "srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \\",
            f'  {_program(request)} run --job "$job" {shlex.join(words)}',
            "code=$?",
            *ends_watcher,
        ]
    )


def _defaults(request: BatchRequest, given: Given) -> list[str]:
    words: list[str] = []
    if "max_restarts" not in given.values:
        words += ["--max-restarts", str(IN_JOB_RESTARTS)]
    has_grace = given.values.keys() & {"preempt_grace_s", "shutdown_timeout"}
    if not has_grace and request.signal_s:
        reserve = min(_SAVE_RESERVE_S, request.signal_s // 2)
        words += ["--preempt-grace", str(request.signal_s - reserve)]
    return words


def _end(request: BatchRequest) -> str:
    next_one = "--chain" if request.chain else "--requeue"
    effect = "lets the chain go on, or cancels its rest" if request.chain else "requeues the job"
    lines = [
        f"# Counts failed allocations, {effect}, and exits with the job's code.",
        f'{_program(request)} slurm finish "$code" --folder "$folder" --retries {request.retries} '
        f"{next_one}",
        "code=$?",
        "exit $code",
    ]
    return "\n".join(lines)


def checked_job(name: str) -> str:
    """The name itself, if a job may have it."""
    try:
        return checked_name("job", name)
    except BadNameError as error:
        raise UsageError(f"--job: {error}") from error
