"""The place of a node that follows from several variables of Slurm, and from those of NVRx. Pure.

Places order the slots of the first round; only their order matters.
"""

import re
from collections.abc import Mapping

from everstep_services.cli.run.arguments import UsageError

_FROM_NAME = "NVRX_INFRA_RANK_FROM_NODENAME"
_PER_BLOCK = 10**10
_LONGEST = 9
_NO = frozenset({"", "0", "false", "no", "off"})


def place_of_topology(environ: Mapping[str, str]) -> int | None:
    """The node's place by its own name if NVRx's variable asks for it, else by its block."""
    name = environ.get("SLURMD_NODENAME", "")
    if environ.get(_FROM_NAME, "").strip().lower() not in _NO:
        place = _digits(name)
        if place is None:
            raise UsageError(
                f"SLURMD_NODENAME={name!r} has no number of up to {_LONGEST} digits, which "
                f"{_FROM_NAME} asks for; unset that variable, or give --infra-rank"
            )
        return place
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(parts) != len(kinds) or "block" not in kinds or kinds[-1] != "node":
        return None
    block, node = _digits(parts[kinds.index("block")]), _digits(parts[-1])
    return None if block is None or node is None else block * _PER_BLOCK + node


def place_in_array(place: int, environ: Mapping[str, str]) -> int:
    """The place among the nodes of all tasks of an array: each task counts its own from 0."""
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or ""
    is_known = re.fullmatch(r"[0-9]{1,9}", task) and re.fullmatch(r"[0-9]{1,9}", nodes)
    return int(task) * int(nodes) + place if is_known else place


def _digits(name: str) -> int | None:
    digits = "".join(re.findall(r"[0-9]+", name))
    return int(digits) if 0 < len(digits) <= _LONGEST else None
