"""What REST answers: shapes for people and programs. Nothing behind HTTP uses these."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from everstep.store.instants import from_us
from everstep.store.shapes import PROJECTED
from everstep.store.tokens import Scope

T = TypeVar("T")

_STRUCTURED = frozenset(
    name for shape in PROJECTED for name, column in shape.columns.items() if column.type == "json"
)


def present(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row as a DTO takes it: moments for `_us`, structures for their texts."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name == "at_us":
            shown["at"] = from_us(value)
        elif name.endswith("_us"):
            shown[f"{name[:-3]}_at"] = None if value is None else from_us(value)
        elif name in _STRUCTURED and value is not None:
            shown[name] = msgspec.json.decode(value)
        else:
            shown[name] = value
    return shown


class Answer(BaseModel):
    """The root of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class PageOf(Answer, Generic[T]):
    """Some of the items of a list."""

    items: list[T]
    next: str | None = Field(description="Give it as `cursor` for the next page; null at the end.")


class Job(Answer):
    """A training run, as far as its facts have told."""

    job: str = Field(description="Its id.", examples=["llama-8b"])
    name: str | None = Field(description="Its name for people.")
    state: str = Field(
        description="`forming`, `starting`, `running`, `restarting`, `idle` (no allocation), or "
        "how it ended: `done`, `failed`, `stopped`.",
        examples=["running"],
    )
    labels: dict[str, str] | None = Field(description="Free labels.")
    command: list[str] | None = Field(description="What each rank runs.")
    config_fingerprint: str | None
    user: str | None = Field(description="Who started it.")
    version: str | None = Field(description="The release that took it on.")
    nodes_min: int | None
    nodes_max: int | None
    ranks_per_node: int | None
    spares: int | None
    max_restarts: int | None = Field(description="The restart budget; null for no limit.")
    started_at: datetime | None
    updated_at: datetime | None = Field(description="When the last fact about it arrived here.")
    ended_at: datetime | None
    end_reason: str | None = Field(description="Why it ended, past which limit.")
    end_incident: str | None
    exit_code: int | None
    round: int | None = Field(description="The newest round.")
    rounds: int | None = Field(description="How many rounds have formed.")
    restarts: int | None
    world_size: int | None
    last_step: int | None
    total_steps: int | None
    lost_steps: int | None = Field(description="Steps that had to be made again.")
    ranks_failed: int | None
    stalls: int | None
    nodes_lost: int | None
    facts: int | None = Field(description="How many facts are kept about it.")
    first_n: int | None = Field(description="Its first fact's place in the log.")
    last_n: int | None = Field(description="Its last fact's place in the log.")
    ended_fact: str | None = Field(description="The fact that says that it ended.")


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


class JobDetail(Job):
    """A job with its allocations, the newest first."""

    allocations: list[Allocation] = Field(description="At most 100.")


class Round(Answer):
    """One span of running workers."""

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
    replaced: int | None = Field(description="Slots that changed hands.")
    restarts: int | None
    recovers_incident: str | None
    waited_s: float | None
    started_at: datetime | None
    start_s: float | None
    master_address: str | None
    master_port: int | None
    warm_ranks: int | None
    slowest_node: str | None
    first_step_at: datetime | None = Field(description="When the training was back.")
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
    end_reason: str | None
    end_node: str | None
    end_rank: int | None
    end_incident: str | None
    end_trigger: str | None = Field(description="The fact that ended it.")
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
    stop_s: float | None
    ranks_killed: int | None
    device_held_bytes: int | None


class Exit(Answer):
    """A rank's process that ended by itself."""

    n: int = Field(description="Its fact's place in the log.")
    id: str = Field(description="Its fact.")
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
    error_name: str | None
    error_text: str | None
    error_place: str | None
    first_error: str | None
    lasted_s: float | None
    step: int | None
    section: str | None
    incident: str | None


class Stall(Answer):
    """A rank that made no progress past its limit."""

    id: str = Field(description="Its fact.")
    n: int | None
    rank: int
    node: str
    at: datetime | None
    phase: str | None
    section: str | None
    step: int | None
    blocked_in: str | None
    waited_s: float | None
    limit_s: float | None
    is_fatal: bool | None
    recovered_at: datetime | None
    stalled_s: float | None


class RoundDetail(Round):
    """A round with its members, exits and stalls."""

    members: list[Member] = Field(description="By slot; at most 1000.")
    exits: list[Exit] = Field(description="In the order of the log; at most 1000.")
    stalls_seen: list[Stall] = Field(description="In the order of the log; at most 1000.")
    is_cut: bool = Field(description="There are more than are shown: see the lists themselves.")


class Node(Answer):
    """A host and the agent on it."""

    node: str
    state: str | None = Field(description="`joined`, `left` or `lost`.")
    state_at: datetime | None
    state_reason: str | None
    job: str | None = Field(description="The job that it joined last.")
    allocation: str | None
    joined_at: datetime | None
    address: str | None
    ranks: int | None
    failure_domain: str | None
    topology: list[str] | None
    device: str | None
    version: str | None
    is_healthy: bool | None = Field(description="By its last check; null when never checked.")
    health_at: datetime | None
    health_reason: str | None
    is_suspect: bool | None
    suspect_at: datetime | None
    suspect_reason: str | None
    is_excluded: bool | None = Field(description="As last decided: see `excluded_until_at`.")
    excluded_at: datetime | None
    excluded_until_at: datetime | None
    excluded_by: str | None
    excluded_reason: str | None
    refused_at: datetime | None
    refused_cause: str | None
    refused_reason: str | None
    joins: int | None
    losses: int | None
    refusals: int | None
    suspicions: int | None
    ranks_failed: int | None
    stalls: int | None
    updated_at: datetime | None
    first_n: int | None
    last_n: int | None


class FactOut(Answer):
    """One fact, as it was sent, and its place in the log."""

    n: int = Field(description="Its place in the log: the order that everything here has.")
    id: str
    job: str = Field(description="The job that it is about, or `_cluster`.")
    kind: str = Field(examples=["rank_exited"])
    round: int | None
    node: str | None
    at: datetime = Field(description="The sender's clock.")
    source: str = Field(examples=["agent/node-07"])
    received_at: datetime = Field(description="Our clock.")
    body: dict[str, Any] = Field(description="The message itself.")


class TokenOut(Answer):
    """What is known of a token."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None = Field(description="To the half minute.")
    revoked_at: datetime | None


class NewToken(TokenOut):
    """A token with its text."""

    token: str = Field(description="Keep it: it is shown only now.")


class TokenWanted(BaseModel):
    """A token to be made."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="Whose it is.",
        examples=["dashboard"],
    )
    scope: Scope = Field("read", description="Each allows what those before it allow.")
    expires_in_s: int | None = Field(None, ge=1, le=10 * 366 * 86400, description="Null for never.")


class Status(Answer):
    """How this replica and the record are."""

    version: str
    epoch: str = Field(description="Names this database; another one numbers facts anew.")
    schema_version: str = Field(description="The schema's newest step.")
    last_n: int = Field(description="How far the log reaches.")
    projected_n: int = Field(description="How far the tables reach.")
    is_rebuilding: bool = Field(description="The tables do not reach as far as the log.")
    stream: str | None = Field(description="The incarnation of the stream that is read.")
    stream_sequence: int | None
    stream_read_at: datetime | None = Field(description="When facts were last written.")
    is_projecting: bool = Field(description="This replica is the one that writes.")
    is_bus_connected: bool
    database: Literal["sqlite", "postgresql"]
    listeners: int = Field(description="Open live streams on this replica.")
