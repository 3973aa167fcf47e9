"""The allocations of a job: how each ended, and whether another one follows."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from everstep.evidence.files import read_regular
from everstep_services.agent.allocation_folder import AgentEnd
from everstep_services.cli.errors import CliError

Outcome = Literal["done", "preempted", "unused", "failed", "final"]
"""`unused`: preempted before any rank trained. `final`: another would end in the same way."""
_FILE = "allocations.jsonl"
_PREEMPTED = 91
_SIGNALS = 64
_FINAL = {
    2: "the command line, a setting or a login is wrong",
    93: "the job was stopped for good",
    130: "a person has interrupted it",
}
_FAILED = {
    1: "a round failed, and the restart budget is spent",
    90: "this node cannot continue with the job",
    92: "there were not enough nodes",
    94: "the control plane could not be reached",
}


class EndedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation that has ended."""

    id: str
    code: int
    nodes: tuple[AgentEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """What follows after an allocation."""

    goes_on: bool
    text: str


def job_code(step_code: int, ends: Iterable[AgentEnd]) -> int:
    """The exit code of the job: that of agents which ended with it, else that of the step.

    `srun` returns the highest code of all tasks, also of nodes that have left early.
    """
    ends = tuple(ends)
    if codes := {end.code for end in ends if end.ends_job}:
        return max(codes)
    if step_code not in {end.code for end in ends}:
        return step_code  # that of an agent that could not write how it ended
    worked = {end.code for end in ends if end.had_work}
    return max(worked) if worked else step_code


def outcome(allocation: EndedAllocation) -> Outcome:
    """What the end of an allocation means for the next one."""
    code, ends = allocation.code, allocation.nodes
    if code == 0:
        return "done"
    if code in {end.code for end in ends} and all(_is_unused(end) for end in ends):
        return "unused"
    if code == _PREEMPTED:
        return "preempted"
    return "final" if code in _FINAL else "failed"


def _is_unused(end: AgentEnd) -> bool:
    return end.cause == "preempted" and not end.had_work


def decide(allocations: Sequence[EndedAllocation], retries: int) -> RetryDecision:
    """Whether another allocation follows after the last of these.

    Failures count only in a row: an allocation that trained until it was preempted ends the row. An
    allocation that was preempted before any rank trained neither counts nor ends the row.
    """
    last = allocations[-1]
    match outcome(last):
        case "done":
            return RetryDecision(goes_on=False, text="the job is done")
        case "final":
            return RetryDecision(
                goes_on=False, text=f"{_FINAL[last.code]} ({last.code}): not retried"
            )
        case "preempted":
            return RetryDecision(goes_on=True, text="preempted after saving: the job continues")
        case "unused":
            text = f"preempted before any rank trained ({last.code}): the job is tried again"
            return RetryDecision(goes_on=True, text=f"{text}, and this does not count")
        case "failed":
            failures = _failures_in_a_row(allocations)
            why = _FAILED.get(last.code, _other(last.code))
            count = f"{why} ({last.code}); failed allocations in a row: {failures}"
            if failures > retries:
                return RetryDecision(
                    goes_on=False, text=f"{count}, and --retries is {retries}: it ends"
                )
            return RetryDecision(
                goes_on=True, text=f"{count}, --retries {retries}: the job is tried again"
            )


def _failures_in_a_row(allocations: Sequence[EndedAllocation]) -> int:
    count = 0
    for allocation in reversed(allocations):
        result = outcome(allocation)
        if result not in {"failed", "unused"}:
            break
        count += result == "failed"
    return count


def _other(code: int) -> str:
    is_signal = 128 < code <= 128 + _SIGNALS
    return f"the agents were ended by signal {code - 128}" if is_signal else "the step failed"


class AllocationLedger:
    """The file with the ended allocations of one job, in the folder that its nodes share."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE
        self.damaged = ""
        """What `read` could not read: a job must go on although a disk was full."""

    def read(self) -> list[EndedAllocation]:
        """All of them, oldest first; a line that was damaged or cut off does not count."""
        try:
            whole, _, _ = read_regular(self.path).rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error
        allocations: list[EndedAllocation] = []
        self.damaged = ""
        for number, line in enumerate(whole.split(b"\n"), start=1):
            try:
                if line:
                    allocations.append(msgspec.json.decode(line, type=EndedAllocation))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                self.damaged = f"{self.path}, line {number}: {error}; this line is not counted"
        return allocations

    def add(self, allocation: EndedAllocation) -> list[EndedAllocation]:
        """Append it, unless it is there already; then return all of them."""
        allocations = self.read()
        if any(each.id == allocation.id for each in allocations):
            return allocations
        allocations.append(allocation)
        try:
            with self.path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                file.write(msgspec.json.encode(allocation) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(error) from error
        return allocations

    def _unusable(self, error: OSError) -> CliError:
        return CliError(
            f"{self.path} cannot be used: {error.strerror}; name a folder that all nodes share "
            f"with --folder"
        )
