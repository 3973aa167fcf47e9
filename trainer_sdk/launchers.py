"""Reads which launcher has started this process, and as which rank, from the environment."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_LONGEST = 128
_RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""The form of a run id that torchrun has generated."""


class _Names(NamedTuple):
    launcher: str
    rank: str
    local_rank: str
    world_size: str
    local_size: str = ""
    slot: str = ""
    needs: str = ""


_LAUNCHERS = (
    _Names("torchrun", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # A batch script has these, too; only processes that srun has started have a step.
    _Names(
        "srun",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        slot="SLURM_NODEID",
        needs="SLURM_STEP_ID",
    ),
)


class LaunchedRank(NamedTuple):
    """A rank that another launcher has started."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_size: int
    """The number of ranks on this node; 0 if unknown."""
    slot: int
    restarts: int
    max_restarts: int

    @property
    def round(self) -> int:
        """The round; each restart by the launcher begins the next."""
        return self.restarts + 1


def launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """The rank that the environment describes; None if no launcher has started this process."""
    for names in _LAUNCHERS:
        try:
            return _place(environ, names)
        except (KeyError, ValueError):
            continue
    return None


def job_of(environ: Mapping[str, str], place: LaunchedRank) -> str:
    """A name for the job, the same for all of its ranks and through all restarts."""
    return _as_name(_job(environ, place))


def given_job_of(environ: Mapping[str, str]) -> str:
    """The name that a person gave the job, the same at its next launch; empty if it has none.

    torchrun generates a UUID for each launch on one node, even if `--rdzv-id` is given.
    """
    if environ.get("EVERSTEP_JOB"):
        return environ["EVERSTEP_JOB"]
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run_id in ("", "none") or _RANDOM.fullmatch(run_id) else _as_name(run_id)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[:_LONGEST] or "job"


def _place(environ: Mapping[str, str], names: _Names) -> LaunchedRank:
    if names.needs and not environ[names.needs]:
        raise KeyError(names.needs)
    rank, local_rank = int(environ[names.rank]), int(environ[names.local_rank])
    slot = environ.get(names.slot) or environ.get("NODE_RANK")
    slot_number = None if slot is None else int(slot)
    local_size = _local_size(environ, names, slot_number or 0)
    if slot_number is None:
        slot_number = rank // local_size if local_size else 0
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    numbers = (rank, local_rank, int(environ[names.world_size]), local_size, slot_number, restarts)
    if min(numbers) < 0:
        raise ValueError(numbers)
    return LaunchedRank(
        names.launcher, *numbers, int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    )


def _local_size(environ: Mapping[str, str], names: _Names, slot: int) -> int:
    if names.launcher != "srun":
        return int(environ.get(names.local_size, "0"))
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(_SLURM_TASKS, "")):
        counts += [int(count)] * min(int(times or 1), 1 << 16)
    return counts[slot] if slot < len(counts) else 0


_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"  # 4(x2),3


def _job(environ: Mapping[str, str], place: LaunchedRank) -> str:
    if environ.get("EVERSTEP_JOB"):
        return environ["EVERSTEP_JOB"]
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return run_id
    if environ.get("SLURM_JOB_ID"):
        return "-".join(["slurm", environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "")])
    host, address = socket.gethostname(), environ.get("MASTER_ADDR", "")
    if place.local_size == place.world_size or address in _LOCAL:
        # torchrun makes a uniquely named folder for each run; by default it gives no run a name.
        folders = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-3]
        run = folders[-1].removeprefix("none_") if folders else environ.get("MASTER_PORT", "")
        return f"{place.launcher}-{host}-{run}"
    return f"{address}-{environ.get('MASTER_PORT', '')}"


def is_worker(environ: Mapping[str, str], place: LaunchedRank) -> bool:
    """Whether a rank has started this process by `multiprocessing`, as a data loader does."""
    started = sys.modules.get("multiprocessing.process")
    if started is None or started.parent_process() is None:
        return False
    name = _rank_variable(place)
    return os.fsencode(f"{name}={environ[name]}") in _environ_of(os.getppid())


def launcher_of(pid: int, place: LaunchedRank) -> int:
    """The process that has started this rank, through any wrappers; 0 if it is gone."""
    begins = os.fsencode(f"{_rank_variable(place)}=")
    while True:
        pid = _parent_of(pid)
        if pid <= 1 or not any(variable.startswith(begins) for variable in _environ_of(pid)):
            return pid if pid > 1 else 0


def _rank_variable(place: LaunchedRank) -> str:
    return next(names.rank for names in _LAUNCHERS if names.launcher == place.launcher)


def _environ_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
