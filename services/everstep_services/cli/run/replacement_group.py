"""The replacement group of this node: the nodes that are replaced together with it."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from everstep_services.cli.run.arguments import UsageError
from everstep_services.cli.run.safe_names import safe_name

NVLINK, ARRAY = "@nvlink", "@array"
_ANSWERS_WITHIN_S = 10.0
_NVIDIA_SMI = ("nvidia-smi", "-q")
_NONE = frozenset({"N/A"})
"""The ClusterUUID of a GPU that is in no NVLink domain; others report zeros."""


def replacement_group(
    text: str, domain: str, topology: Sequence[str], environ: Mapping[str, str]
) -> str:
    """The group by its name, by the hardware or the scheduler, or else by domain and topology.

    Raises `UsageError` if there is none.
    """
    if text == NVLINK:
        return nvlink_domain(environ)
    if text == ARRAY:
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if not array or not task:
            raise UsageError(
                "--group @array: SLURM_ARRAY_TASK_ID is not set, so this is not a task of an array "
                "of Slurm; give the group's name"
            )
        return safe_name(f"{array}_{task}", "group")
    if text.startswith("@"):
        raise UsageError(f"--group {text}: give a name, {NVLINK} or {ARRAY}")
    group = text or domain or "/".join(topology)
    if not group:
        raise UsageError(
            "--group-size: this node has no replacement group; give it --group, --domain or "
            "--topology, or the topology plugin in slurm.conf"
        )
    return group


def check_groups(spares: int, size: int) -> None:
    """Raise `UsageError` unless the spares are whole groups."""
    if spares % size:
        raise UsageError(
            f"--spares {spares}: with --group-size {size} a spare group has {size} nodes; give a "
            f"multiple of it"
        )


def nvlink_domain(environ: Mapping[str, str]) -> str:
    """The ClusterUUID that all GPUs of this node report: their NVLink domain."""
    try:
        done = subprocess.run(  # noqa: S603  found on PATH, as by a person
            _NVIDIA_SMI,
            capture_output=True, text=True, check=True, timeout=_ANSWERS_WITHIN_S,
            env=dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"--group {NVLINK}: `{' '.join(_NVIDIA_SMI)}` has failed: {error}; give the group's "
            f"name"
        ) from error
    domains = set(re.findall(r"ClusterUUID\s*:\s*(\S+)", done.stdout))
    if len(domains) != 1 or not domains.isdisjoint(_NONE) or not _is_set(next(iter(domains))):
        shown = ", ".join(sorted(domains)) or "no ClusterUUID"
        raise UsageError(
            f"--group {NVLINK}: the GPUs of this node report {shown}, which is not one NVLink "
            f"domain; give the group's name"
        )
    return f"nvlink-{next(iter(domains))}"


def _is_set(uuid: str) -> bool:
    return bool(uuid.strip("0-"))
