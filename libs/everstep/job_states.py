"""The states of jobs, rounds and nodes, and what follows from each: the one table of them.

The words are those of REST, which stay open on the wire: a newer service may have more of them. To
add a state, add a member and a row to `meaning_of`: mypy reports every place that must know it.
"""

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

RoundState = Literal["forming", "starting", "running", "ended"]
JobEndState = Literal["done", "failed", "stopped", "unknown"]
"""How a job ended, as `job_ended.state` has it; `unknown` is an end that nobody saw."""
JobState = Literal["forming", "starting", "running", "restarting", "idle", JobEndState]
NodePresence = Literal["joined", "left", "lost"]
"""Whether a node takes part in a job, as history last heard."""
NODE_PRESENCES: tuple[NodePresence, ...] = get_args(NodePresence)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStateMeaning:
    """What follows from one state of a job."""

    is_at_work: bool = False
    """Agents of an allocation run its ranks, or wait for its next round."""
    has_ranks: bool = False
    """Its newest round has ranks."""
    is_over: bool = False
    """It has ended, and no later allocation continues it."""


def meaning_of(state: JobState) -> JobStateMeaning:
    """What follows from a state."""
    match state:
        case "starting" | "running":
            return JobStateMeaning(is_at_work=True, has_ranks=True)
        case "forming" | "restarting":
            return JobStateMeaning(is_at_work=True)
        case "idle":  # between two allocations; or others record facts of it, and no agent runs it
            return JobStateMeaning()
        case "done" | "failed" | "stopped" | "unknown":
            return JobStateMeaning(is_over=True)
        case _:
            assert_never(state)


def state_of_job(newest: RoundState) -> JobState:
    """The state of a job that is not over and has an allocation, from that of its newest round."""
    match newest:
        case "forming" | "starting" | "running":
            return newest
        case "ended":
            return "restarting"
        case _:
            assert_never(newest)


JOB_STATES: tuple[JobState, ...] = get_args(JobState)
AT_WORK = tuple(state for state in JOB_STATES if meaning_of(state).is_at_work)
WITH_RANKS = tuple(state for state in JOB_STATES if meaning_of(state).has_ranks)
OVER = tuple(state for state in JOB_STATES if meaning_of(state).is_over)
