"""The node according to its scheduler and host: its id, its place, its start."""

import errno
import re
import socket
from collections.abc import Mapping
from typing import Any

from everstep.ids import new_id
from everstep_services.agent.run_plan import Scheduler
from everstep_services.cli.run.arguments import UsageError
from everstep_services.cli.run.safe_names import safe_name

_PLACES = (
    ("GROUP_RANK", "", ""),
    ("NODE_RANK", "", ""),
    ("CROSS_SLURM_PROCID", "", ""),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "", ""),
    ("JOB_COMPLETION_INDEX", "", ""),
)
"""Where a node's place is looked for, the first that is set wins; one that counts tasks only
where these two are the same."""

JOB_INDEX, PODS_PER_JOB = "JOBSET_JOB_INDEX", "JOBSET_PODS_PER_JOB"
"""Set by manifests of `everstep kubernetes job`."""

_IN_ALLOCATION = frozenset({"SLURM_PROCID", "SLURM_NODEID"})
"""Variables that count the nodes of one allocation or one task of an array."""

_PLACE_BY_NAME = "NVRX_INFRA_RANK_FROM_NODENAME"
_NODES_A_BLOCK = 10**10
_DIGITS_MOST = 9
_NO = frozenset({"", "0", "false", "no", "off"})


def scheduler_of(environ: Mapping[str, str]) -> Scheduler:
    """The scheduler that started this process."""
    if environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        job = f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]
        attempt = _whole("SLURM_RESTART_COUNT", environ.get("SLURM_RESTART_COUNT") or "0", "")
        return Scheduler("slurm", job, attempt)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return Scheduler("kubernetes", environ.get("JOB_NAME", ""))
    return Scheduler()


def infra_rank(environ: Mapping[str, str]) -> int | None:
    """The node's place, from the first variable that gives one."""
    by_topology = place_of_topology(environ)
    for name, tasks, nodes in _PLACES:
        text = environ.get(name)
        if by_topology is not None and name in _IN_ALLOCATION:
            return by_topology
        if text and environ.get(tasks) == environ.get(nodes):
            place = _whole(name, text, "; correct it, or give --infra-rank")
            if name == "JOB_COMPLETION_INDEX":
                return _place_in_job_set(place, environ)
            return place_in_array(place, environ) if name in _IN_ALLOCATION else place
    return by_topology


def _place_in_job_set(place: int, environ: Mapping[str, str]) -> int:
    """The place among the pods of all jobs of a JobSet: each job counts its own from 0."""
    job, pods = environ.get(JOB_INDEX), environ.get(PODS_PER_JOB)
    if not job or not pods:
        return place
    return _whole(JOB_INDEX, job, "") * _whole(PODS_PER_JOB, pods, "") + place


def refuse_crowds(environ: Mapping[str, str]) -> None:
    """One agent a node: srun with a task for each rank would start many with the same id."""
    tasks, nodes = environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_STEP_NUM_NODES")
    if not tasks or not nodes or not tasks.isdecimal() or not nodes.isdecimal():
        return
    if int(tasks) > int(nodes):
        raise UsageError(
            f"srun started {tasks} tasks on {nodes} nodes, but a node has one agent, which starts "
            f"its ranks itself: use srun --ntasks-per-node=1, or give each task its own --node-id"
        )


def allocation_id(scheduler: Scheduler) -> str:
    """An id for this start: the same on all nodes where a scheduler tells, else random."""
    if scheduler.name == "slurm":
        again = f"-restart-{scheduler.attempt}" if scheduler.attempt else ""
        return safe_name(f"slurm-{scheduler.job}{again}", "allocation")
    return new_id()


def topology(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The node's place in the topology, outermost first: as given, else as in Slurm."""
    if text:
        return tuple(part.strip() for part in re.split(r"[/,]", text) if part.strip())
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(parts) != len(kinds):
        return ()
    return tuple(part for part, kind in zip(parts, kinds, strict=True) if part and kind != "node")


def address_towards(url: str) -> str:
    """The address of this host by which it reaches the bus, as other nodes reach it.

    The host name where that is not known: no packet is sent, so a firewall does not matter.
    """
    match = re.search(r"://(?:[^@/]*@)?(\[[^\]]+\]|[^:/,]+)(?::(\d+))?", url)
    if match:
        host, port = match[1].strip("[]"), int(match[2] or 4222)
        try:
            family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError:
            pass
    return socket.gethostname()


def check_resolves(address: str) -> None:
    """Refuse a name that other nodes could not resolve either."""
    try:
        socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--address {address!r} cannot be resolved ({error}): give an address of this host, or "
            f"a name that every node of the job can resolve"
        ) from error


def is_elsewhere(address: str) -> bool:
    """No interface of this host has it. False where that is not known, as for an unknown name."""
    try:
        addresses = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return all(_is_foreign(family, place) for family, _, _, _, place in addresses)


def _is_foreign(family: int, place: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(place)
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def _whole(name: str, text: str, remedy: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UsageError(f"{name}={text!r} is not a whole number, 0 or more{remedy}")
    return int(text)


def place_of_topology(environ: Mapping[str, str]) -> int | None:
    """The node's place by its own name if NVRx's variable asks for it, else by its block."""
    name = environ.get("SLURMD_NODENAME", "")
    if environ.get(_PLACE_BY_NAME, "").strip().lower() not in _NO:
        place = _digits(name)
        if place is None:
            raise UsageError(
                f"SLURMD_NODENAME={name!r} has no number of up to {_DIGITS_MOST} digits, which "
                f"{_PLACE_BY_NAME} asks for; unset that variable, or give --infra-rank"
            )
        return place
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(parts) != len(kinds) or "block" not in kinds or kinds[-1] != "node":
        return None
    block, node = _digits(parts[kinds.index("block")]), _digits(parts[-1])
    return None if block is None or node is None else block * _NODES_A_BLOCK + node


def place_in_array(place: int, environ: Mapping[str, str]) -> int:
    """The place among the nodes of all tasks of an array: each task counts its own from 0."""
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    is_known = re.fullmatch(r"[0-9]{1,9}", task) and re.fullmatch(r"[0-9]{1,9}", nodes)
    return int(task) * int(nodes) + place if is_known else place


def _digits(name: str) -> int | None:
    digits = "".join(re.findall(r"[0-9]+", name))
    return int(digits) if 0 < len(digits) <= _DIGITS_MOST else None
