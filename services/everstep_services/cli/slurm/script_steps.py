"""What a batch script does next to its step: end an allocation, watch for drained nodes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_services.agent.allocation_folder import AllocationFolder
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.run.arguments import UsageError
from everstep_services.cli.run.safe_names import safe_name
from everstep_services.cli.slurm.allocations import (
    AllocationLedger,
    EndedAllocation,
    decide,
    job_code,
)
from everstep_services.cli.slurm.batch_script import DrainMode
from everstep_services.cli.slurm.controller import SlurmController

Say = Callable[[str], None]
FOLDER = "EVERSTEP_AGENT__ALLOCATION_DIR"
_RUNNING = frozenset({"RUNNING", "SUSPENDED"})


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The job that this script belongs to, by its environment."""

    id: str
    restarts: int
    array: str
    is_last_task: bool
    nodes: str
    folder: Path | None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "SlurmJob":
        """Raise `UsageError` outside of a batch script."""
        job = environ.get("SLURM_JOB_ID", "")
        if not job:
            raise UsageError(
                "SLURM_JOB_ID is not set: this command belongs into a batch script of Slurm; "
                "`everstep slurm sbatch` writes one"
            )
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        folder = environ.get(FOLDER)
        task, last = environ.get("SLURM_ARRAY_TASK_ID"), environ.get("SLURM_ARRAY_TASK_MAX")
        return cls(
            id=job,
            restarts=int(restarts) if restarts.isdecimal() else 0,
            array=environ.get("SLURM_ARRAY_JOB_ID", ""),
            is_last_task=task is not None and task == last,
            nodes=environ.get("SLURM_JOB_NODELIST", ""),
            folder=Path(folder) if folder else None,
        )


def finish(  # noqa: PLR0913  each is a port or what was asked for
    job: SlurmJob,
    step_code: int,
    ledger: AllocationLedger,
    retries: int,
    *,
    in_chain: bool,
    slurm: SlurmController,
    say: Say,
) -> int:
    """Count this allocation, have the next one follow or not, and return the job's code."""
    if in_chain and not job.array:
        raise UsageError("--chain: this job is not an array; submit it with --array, or requeue it")
    ends = tuple(AllocationFolder(job.folder).ends()) if job.folder else ()
    code = job_code(step_code, ends)
    allocation = EndedAllocation(id=f"{job.id}-{job.restarts}", code=code, nodes=ends)
    decision = decide(ledger.add(allocation), retries)
    if ledger.damaged:
        say(ledger.damaged)
    say(decision.text)
    if in_chain:
        _continue_chain(job, goes_on=decision.goes_on, slurm=slurm, say=say)
    elif decision.goes_on:
        _requeue(job, slurm, say)
    return code


def _requeue(job: SlurmJob, slurm: SlurmController, say: Say) -> None:
    state = slurm.job_state(job.id)
    if state not in _RUNNING:  # a cancelled job that is requeued would start again
        say(f"Slurm is ending job {job.id} itself ({state or 'gone'}): not requeued by this script")
        return
    say(f"job {job.id} is requeued")
    slurm.requeue(job.id)


def _continue_chain(job: SlurmJob, *, goes_on: bool, slurm: SlurmController, say: Say) -> None:
    if not goes_on:
        say(f"the rest of the chain, array {job.array}, is cancelled")
        slurm.cancel_pending(job.array)
    elif job.is_last_task:
        say("this was the last allocation of the chain: submit another one to continue")


class ExclusionDrains:
    """Drains the nodes that Everstep has excluded, or only reports that it would."""

    def __init__(self, job: SlurmJob, mode: DrainMode, slurm: SlurmController, say: Say) -> None:
        self._job = job
        self._mode = mode
        self._slurm = slurm
        self._say = say
        self._seen: set[str] = set()

    def settle(self, folder: AllocationFolder) -> None:
        """Act on each node once, as long as it stays excluded."""
        if self._mode == "off":
            return
        excluded = folder.exclusions()
        self._seen &= excluded.keys()
        new = excluded.keys() - self._seen
        if not new:
            return
        names = {safe_name(name, "node"): name for name in self._slurm.hostnames(self._job.nodes)}
        for node in sorted(new):
            self._settle(names.get(node), node, excluded[node])
            self._seen.add(node)

    def _settle(self, name: str | None, node: str, reason: str) -> None:
        if name is None:
            self._say(f"{node} is excluded, and is not a node of this allocation: not drained")
            return
        if self._mode == "observe":
            self._say(f"{name} would be drained with --drain-excluded enforce: {reason}")
            return
        try:
            self._slurm.drain(name, f"everstep: {reason}")
        except CliError as error:
            if error.code is Exit.UNREACHABLE:
                raise
            self._say(
                f"{name} is excluded, and Slurm refuses to drain it: {error}; draining needs an "
                f"operator of Slurm: drain it by hand, or run this job's watch as one"
            )
            return
        self._say(f"{name} is drained: {reason}")


def watch_drains(
    job: SlurmJob,
    every_s: float,
    slurm: SlurmController,
    say: Say,
    sleep: Callable[[float], None] = time.sleep,
    *,
    drains: DrainMode = "off",
) -> None:
    """Ask the agents of drained nodes to leave, for ever. Raises `UsageError` without a folder."""
    if job.folder is None or not job.nodes:
        missing = FOLDER if job.folder is None else "SLURM_JOB_NODELIST"
        raise UsageError(f"{missing} is not set: `everstep slurm sbatch` writes a script with it")
    folder, asked = AllocationFolder(job.folder), set[str]()
    exclusions = ExclusionDrains(job, drains, slurm, say)
    folder.create()
    is_away = False
    while True:
        try:
            leaving = slurm.leaving_nodes(job.nodes)
            exclusions.settle(folder)
        except CliError as error:
            if error.code is Exit.USAGE:
                raise
            if not is_away:
                say(f"{error}; drained nodes are noticed once it answers again")
            is_away = True
        else:
            if is_away:
                say("Slurm's controller answers again")
            is_away = False
            _ask_to_leave(leaving, asked, folder, say)
        sleep(every_s)


def _ask_to_leave(
    leaving: Mapping[str, str], asked: set[str], folder: AllocationFolder, say: Say
) -> None:
    """Ask each agent once; a node that was resumed may be drained again."""
    for node in leaving.keys() - asked:
        reason = f"Slurm drains {node}" + (f" ({leaving[node]})" if leaving[node] else "")
        say(f"{reason}: its agent is asked to leave")
        folder.ask_to_leave(safe_name(node, "node"), reason)
        asked.add(node)
    asked &= leaving.keys()
