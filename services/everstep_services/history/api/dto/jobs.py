"""Jobs, their rounds and their ranks, as REST shows them."""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from everstep.store.queries import Record
from everstep.store.times import from_us
from everstep_services.history.api.dto.answer import (
    Answer,
    culprit_headline,
    present,
    with_injection,
)


class BudgetOut(Answer):
    """What is left of a limit on actions."""

    name: str = Field(examples=["restarts"])
    limit: int
    left: Annotated[int, AfterValidator(partial(max, 0))]
    """How many the limit still allows after the last decision."""


class Job(Answer):
    """A training run, from its facts."""

    job: str = Field(description="The job's id.", examples=["llama-8b"])
    name: str | None = Field(description="The job's name for people.")
    state: str = Field(examples=["running"])
    """`forming`, `starting`, `running`, `restarting`, `idle` (no allocation), or how it ended:
    `done`, `failed`, `stopped` or `unknown` (nobody saw its end)."""
    labels: dict[str, str] | None = Field(description="The labels that its user has chosen.")
    command: list[str] | None = Field(description="What each rank runs.")
    config_fingerprint: str | None
    user: str | None = Field(description="The user who started it.")
    version: str | None = Field(description="The release of Everstep that started it.")
    nodes_min: int | None
    nodes_max: int | None
    ranks_per_node: int | None
    spares: int | None
    max_restarts: int | None = Field(description="The restart budget; null for no limit.")
    max_restarts_per_hour: int | None
    no_progress_limit: int | None
    """Rounds in a row that may end without a new step."""
    budgets: list[BudgetOut] | None
    """The restart budgets after the last decision about the job."""
    started_at: datetime | None
    updated_at: datetime | None
    """When the last fact about the job arrived in the record."""
    stalled_since: datetime | None
    """The last progress of its ranks, if they stand still now and their round goes on, because
    stalls are only observed."""
    ended_at: datetime | None
    end_reason: str | None = Field(description="Why the job ended, with the limit that was passed.")
    end_incident: str | None
    end_headline: str | None
    """The same, after the verdict if the verdict names other culprits."""
    exit_code: int | None
    round: int | None = Field(description="The newest round.")
    rounds: int | None = Field(description="How many rounds have formed.")
    restarts: int | None
    world_size: int | None
    last_step: int | None
    """The newest step that was reported; while ranks run, that of their last beats. Steps of a
    script that does not number them are counted anew in each round."""
    total_steps: int | None
    is_counted_anew: bool | None
    """The script does not number its steps: `last_step` is that of one round."""
    lost_steps: int | None
    """Steps that had to be trained again after a restart; null if that is not known, because the
    script does not number its steps, or shows none."""
    ranks_failed: int | None
    stalls: int | None
    nodes_lost: int | None
    incidents: int | None = Field(description="The number of its incidents.")
    facts: int | None = Field(description="How many facts about the job are kept.")
    first_n: int | None = Field(description="The place of its first fact in the log.")
    last_n: int | None = Field(description="The place of its last fact in the log.")
    ended_fact: str | None = Field(description="The id of the fact of its end.")


class Allocation(Answer):
    """One start of a job's agents."""

    allocation: str
    started_at: datetime | None
    scheduler: str | None
    scheduler_job: str | None
    attempt: int | None
    nodes_promised: int | None
    nodes_joined: int | None
    rounds: int | None
    time_limit_s: float | None
    grace_s: float | None
    ended_at: datetime | None
    end_state: str | None
    end_reason: str | None
    exit_code: int | None
    lasted_s: float | None


class Watch(Answer):
    """The state of stall detection on the nodes of the newest round."""

    state: str = Field(examples=["armed"])
    """The state of the least watched node: `off`, `paused` (by the script), `learning` (limits are
    the defaults) or `armed`."""
    reason: str = Field(description="Why, as reported by that node.")
    at: datetime | None = Field(description="Since when; null if only beats report it.")
    node: str | None = Field(description="That node.")
    nodes: dict[str, int] = Field(examples=[{"armed": 63, "paused": 1}])
    """The number of nodes in each state."""


class JobDetail(Job):
    """A job with its allocations, the newest first."""

    watch: Watch | None
    """The state of stall detection; null if no agent has reported it."""
    allocations: list[Allocation] = Field(description="The newest allocations; at most 100.")


class Round(Answer):
    """One round: the ranks run from its start until it ends."""

    job: str
    round: int
    state: str = Field(description="`forming`, `starting`, `running` or `ended`.")
    allocation: str | None
    nodes_waiting: int | None
    nodes_needed: int | None
    waiting_reason: str | None
    formed_at: datetime | None
    formed_cause: str | None
    formed_reason: str | None
    world_size: int | None
    nodes: int | None
    spares: int | None
    replaced: int | None = Field(description="The number of slots that another node has taken.")
    restarts: int | None
    recovers_incident: str | None
    waited_s: float | None
    started_at: datetime | None
    start_s: float | None
    master_address: str | None
    master_port: int | None
    warm_ranks: int | None
    slowest_node: str | None
    healed_at: datetime | None
    """When all ranks had their states, if some had kept theirs from the round before."""
    healed: str | None = Field(examples=["rank 5 was replaced, 7 kept their state"])
    """What became of the ranks and their states then."""
    healed_step: int | None = Field(description="The step from which they went on.")
    healed_kept: int | None = Field(description="How many ranks kept their state.")
    healed_took_s: float | None = Field(description="How long it took until all had theirs.")
    first_step_at: datetime | None
    """When the first step of the round was finished."""
    first_step: int | None
    last_step: int | None
    lost_steps: int | None
    ranks_started: int | None
    ranks_exited: int | None
    ranks_failed: int | None
    ranks_stopped: int | None
    ranks_killed: int | None
    stalls: int | None
    ended_at: datetime | None
    end_cause: str | None
    end_reason: str | None = Field(description="The reason in the report that ended it.")
    end_headline: str | None
    """The same, after the verdict if the verdict names other culprits."""
    end_node: str | None
    end_rank: int | None
    end_incident: str | None
    end_trigger: str | None = Field(description="The id of the fact that ended it.")
    lasted_s: float | None
    facts: int | None
    first_n: int | None
    last_n: int | None


class Member(Answer):
    """A node's place in a round."""

    slot: int
    node: str | None
    first_rank: int | None
    ranks: int | None
    stopped_at: datetime | None
    stopped_ranks: list[int] | None
    """The ranks that its agent stopped when the round was over."""
    killed_ranks: list[int] | None
    """Ranks that outlived the grace period, and were killed."""
    stop_s: float | None
    evidence_s: float | None
    device_wait_s: float | None
    device_held_bytes: int | None
    ranks_killed: int | None


class Exit(Answer):
    """A rank's process that ended by itself."""

    n: int = Field(description="The place of the fact in the log.")
    id: str = Field(description="The id of the fact.")
    job: str
    round: int
    rank: int
    local_rank: int | None
    node: str
    slot: int | None
    at: datetime
    how: str = Field(description="`done`, `error`, `signal`, `out_of_memory` …")
    is_failure: bool
    exit_code: int | None
    signal: str | None
    error_name: str | None = Field(description="The exception's class.")
    error_text: str | None
    error_place: str | None = Field(description="The innermost frame of the user's own code.")
    error_chain: list[str] | None
    """The exceptions that led to this one, the outermost first."""
    traceback: str | None = Field(description="The end of the traceback, at most 8000 characters.")
    first_error: str | None = Field(description="The first line of its output that reports one.")
    core_dumped: bool | None
    pid: int | None
    has_log: bool = Field(description="The end of its output was kept: see its `/log`.")
    lasted_s: float | None
    step: int | None
    section: str | None
    incident: str | None


_OF_THE_END = (
    "ended_fact", "ended_us", "end_state", "end_reason", "end_incident", "exit_code",
)  # fmt: skip


def shown_job(row: Record) -> dict[str, Any]:
    """As a client sees it: of a job that was taken up again, without how it had ended."""
    end, begun = row["ended_fact"], row["begun_fact"]
    is_over = end is None or begun is None or end > begun
    shown = present(row if is_over else {**row, **dict.fromkeys(_OF_THE_END)})
    began_anew = row["is_counted_anew"] and (row["rounds"] or 0) > 1  # without an incident, too
    if (row["unknown_losses"] or began_anew) and not row["lost_steps"]:
        shown["lost_steps"] = None
    headline = _end_headline(shown, shown["reported_rank"], shown["reported_node"])
    since = row["stalled_since"]
    since = None if since is None else from_us(since)
    return {**shown, "end_headline": headline, "stalled_since": since}


def shown_round(row: Record) -> dict[str, Any]:
    """As a client sees it."""
    shown = present(row)
    return {**shown, "end_headline": _end_headline(shown, shown["end_rank"], shown["end_node"])}


def _end_headline(shown: Mapping[str, Any], rank: int | None, node: str | None) -> str | None:
    headline, reason = culprit_headline(shown, rank, node), shown["end_reason"]
    if headline and reason:
        return f"{headline}; first reported: {reason}"
    return with_injection(shown, reason)


def shown_exit(row: Record) -> Exit:
    """As a client sees it: where the end of its output is, is ours to know."""
    return Exit(**present(row), has_log=row["log"] is not None)


class Stall(Answer):
    """A rank that made no progress past its limit."""

    id: str = Field(description="The id of the fact.")
    n: int | None
    rank: int
    node: str
    at: datetime | None
    phase: str | None
    section: str | None
    step: int | None
    shown_by: str | None = Field(description="What shows progress: `page` or `collectives`.")
    blocked_in: str | None = Field(examples=["it waits for a lock (futex_wait_queue)"])
    """Where the rank's process is blocked, by the kernel and by the stacks of its threads."""
    process_state: str | None = Field(description="The kernel's letter: `S`, `D`, `T`, `R`.")
    waited_s: float | None
    """The time without progress until the stall was reported."""
    limit_s: float | None
    limit_source: str | None
    """`learned`, `configured`, `default`, `floor` or `cap`."""
    limit_origin: str | None = Field(examples=["--limit"])
    """Where somebody has set the limit: an option, a setting, `everstep limits`, a wrapper."""
    is_fatal: bool | None
    """True if the stall ends the round; false in observe mode."""
    recovered_at: datetime | None
    stalled_s: float | None


class RoundDetail(Round):
    """A round with its members, exits and stalls."""

    members: list[Member] = Field(description="The members by slot; at most 1000.")
    exits: list[Exit] = Field(description="In the order of the log; at most 200.")
    stalls_seen: list[Stall]
    """The stalls in the order of the log; at most 1000."""
    is_cut: bool = Field(description="True if there are more than are shown; the lists have all.")
