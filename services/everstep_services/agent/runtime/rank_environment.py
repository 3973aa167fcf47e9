"""The environment of a rank: torchrun's, so that unmodified scripts run, and our own variables."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import EverstepError
from everstep.messages import StartRanks
from everstep_services.agent.run_plan import RunPlan
from trainer_sdk import layout

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NO_LIMIT = 1_000_000
"""TORCHELASTIC_MAX_RESTARTS for a job without a limit: scripts read it as a number."""


_OF_LOGINS = re.compile(
    r"EVERSTEP_(?:BUS|CLIENT|API|HISTORY|LOGINS)__.*"
    r"|EVERSTEP_.*(?:TOKEN|PASSWORD|SECRET|CREDENTIAL|SEED).*"
)
"""Variables with which our processes log in to the bus and the API; scripts do not need them."""


_NOT_INHERITED = (
    layout.INJECTION_VARIABLE,
    layout.IMAGES_VARIABLE,
    layout.IMAGES_MOST_VARIABLE,
    layout.LIMITS_VARIABLE,
    layout.STAND_IN_VARIABLE,
    layout.CPUS_VARIABLE,
    layout.MEMORY_NODES_VARIABLE,
)
_STAND_IN = os.path.join(os.path.dirname(os.path.abspath(layout.__file__)), "nvrx", "path")
"""The folder with a package of NVRx's name."""


class DevicesMissingError(EverstepError):
    """There are more ranks than devices, and each rank should see a device of its own."""

    def __init__(self, local_rank: int, visible: str) -> None:
        super().__init__(
            f"--virtual-local-rank: local rank {local_rank} has no device, as "
            f"CUDA_VISIBLE_DEVICES is {visible!r}; lower --nproc-per-node"
        )


@dataclass(frozen=True, slots=True)
class RankPaths:
    """Files and sockets that one rank is given."""

    error_file: Path
    """TORCHELASTIC_ERROR_FILE, to which an uncaught exception is written."""
    images: Path | None = None
    """Where the rank keeps its states in memory."""


def without_logins(base: Mapping[str, str]) -> dict[str, str]:
    """The environment without our logins, for the ranks and everything that starts them."""
    return {name: value for name, value in base.items() if not _OF_LOGINS.fullmatch(name)}


def environment(
    plan: RunPlan, order: StartRanks, local_rank: int, base: Mapping[str, str], paths: RankPaths
) -> dict[str, str]:
    """The whole environment of a rank. `base` is the environment of `everstep run`."""
    variables = without_logins(base)
    for name in _NOT_INHERITED:
        variables.pop(name, None)
    if paths.images is not None:
        variables[layout.IMAGES_VARIABLE] = str(paths.images)
        if (most := plan.checkpoints.own_most_bytes) is not None:
            variables[layout.IMAGES_MOST_VARIABLE] = str(max(most // order.ranks, 1))
    variables |= _choices(plan, variables.get("PYTHONPATH", ""))
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if order.ranks > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")
    variables |= _cpus(plan, local_rank)
    if plan.stand_in:
        variables |= _as_nvrx(plan, order)
    return variables | _places(plan, order, local_rank) | _devices(plan, local_rank, base) | {
        "MASTER_ADDR": order.master_address,
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(
            _NO_LIMIT if order.max_restarts is None else order.max_restarts
        ),
        "TORCHELASTIC_RUN_ID": plan.run_id or plan.job,
        # The agent hosts no store: rank 0 does, and it dies with its round.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(plan.signals),
        "TORCHELASTIC_ERROR_FILE": str(paths.error_file),
        "EVERSTEP_JOB": plan.job,
        "EVERSTEP_NODE": plan.node,
        "EVERSTEP_ROUND": str(order.round),
        "EVERSTEP_SLOT": str(order.slot),
    }  # fmt: skip


def _choices(plan: RunPlan, python_path: str) -> dict[str, str]:
    """What the plan says about all ranks."""
    chosen: dict[str, str] = {}
    if plan.allow_fresh_start:
        chosen[layout.FRESH_VARIABLE] = "1"
    if plan.allow_injection:
        chosen[layout.INJECTION_VARIABLE] = "1"
    if plan.limits.configured:
        chosen[layout.LIMITS_VARIABLE] = json.dumps(dict(plan.limits.configured), sort_keys=True)
    if plan.stand_in:
        chosen[layout.STAND_IN_VARIABLE] = plan.stand_in
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [_STAND_IN, python_path]))
    return chosen


def _as_nvrx(plan: RunPlan, order: StartRanks) -> dict[str, str]:
    """What a script that NVRx has started reads about its attempt."""
    place = order.slot if plan.infra_rank is None else plan.infra_rank
    return {
        "NVRX_CYCLE": str(order.restarts),
        "NVRX_MEMBERSHIP": "active",
        "NVRX_INFRA_RANK": str(place),
    }


def _cpus(plan: RunPlan, local_rank: int) -> dict[str, str]:
    """The CPUs of a rank, and the NUMA nodes whose memory it prefers."""
    if local_rank >= len(plan.cpu_bindings):
        return {}
    binding = plan.cpu_bindings[local_rank]
    nodes = ",".join(map(str, binding.memory_nodes))
    chosen = {layout.CPUS_VARIABLE: binding.cpu_list, layout.MEMORY_NODES_VARIABLE: nodes}
    return {**chosen, layout.STRICT_VARIABLE: "1"} if binding.is_strict else chosen


def shared_and_own(
    plan: RunPlan, base: Mapping[str, str], paths: RankPaths
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that all ranks of a node share in each round, and the names of the others."""
    first, other = (
        environment(plan, order, 0, base, paths) for order in (_example(plan, 1), _example(plan, 2))
    )
    shared = {name: value for name, value in first.items() if other.get(name) == value}
    if plan.ranks_per_node > 1:
        for name in ("LOCAL_RANK", layout.CPUS_VARIABLE, layout.MEMORY_NODES_VARIABLE):
            shared.pop(name, None)
    if plan.virtual_local_rank:
        shared.pop(_VISIBLE)
    return shared, tuple(sorted((first.keys() | other.keys()) - shared.keys()))


def _example(plan: RunPlan, number: int) -> StartRanks:
    """A sample order; two of them differ in everything that may differ between rounds."""
    return StartRanks(
        id="0" * 32,
        job=plan.job,
        round=number,
        reason="",
        slot=number,
        slots=number + 1,
        first_rank=number * plan.ranks_per_node,
        ranks=plan.ranks_per_node,
        world_size=(number + 1) * plan.ranks_per_node,
        master_address=f"address-{number}",
        master_port=number,
        restarts=number,
        max_restarts=plan.spec.max_restarts,
    )


def _places(plan: RunPlan, order: StartRanks, local_rank: int) -> dict[str, str]:
    """The identity of a rank. All ranks of a job have one role, whose world is the job's."""
    rank, world = str(order.first_rank + local_rank), str(order.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(order.slot),
        "ROLE_RANK": rank,
        "ROLE_NAME": plan.role,
        "LOCAL_WORLD_SIZE": str(order.ranks),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(order.slots),
        "ROLE_WORLD_SIZE": world,
    }


def _devices(plan: RunPlan, local_rank: int, base: Mapping[str, str]) -> dict[str, str]:
    """With virtual local ranks each rank is the first on a node with one device."""
    if not plan.virtual_local_rank:
        return {}
    visible = base.get(_VISIBLE)
    devices = None if visible is None else [part.strip() for part in visible.split(",")]
    if devices is not None and local_rank >= len(devices):
        raise DevicesMissingError(local_rank, visible or "")
    device = str(local_rank) if devices is None else devices[local_rank]
    return {"LOCAL_RANK": "0", _VISIBLE: device}
