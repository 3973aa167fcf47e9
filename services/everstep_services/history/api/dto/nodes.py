"""Nodes, as REST shows them."""

from datetime import datetime

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer


class ProbeNow(Answer):
    """A check that runs in short intervals, also during a training."""

    check: str = Field(examples=["nic"])
    every_s: float
    """The seconds between two runs; a costly probe runs less often."""
    policy: str = Field(description="`observe`, `end_round` or `exclude`.")
    state: str
    """The last result: `ok`, `warning`, `failed`, `unknown` or `unsupported`; empty before the
    first run."""
    failures: int = Field(description="The number of failed runs in a row, up to now.")
    failures_limit: int
    """The number of failed runs in a row after which the probe counts as failed."""
    has_failed: bool = Field(description="True once the probe counts as failed, until it recovers.")


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
    nvlink_domain: str | None
    """The NVLink domain of its GPUs, named by their ClusterUUID; null for none."""
    is_healthy: bool | None
    """By its last checks; null if it was never checked, or no check had a result."""
    health_at: datetime | None
    health_reason: str | None
    strikes: int | None
    """Evidence against it, over all jobs, within health's window: as health counts now, or, while
    health is away, as it counted when it suspected the node."""
    strikes_limit: int | None
    """The number of strikes that makes a node suspect."""
    is_suspect: bool | None
    suspect_at: datetime | None
    suspect_cause: str | None = Field(examples=["incidents"])
    """`check`, `probe`, `incidents`, `straggler` or `operator`."""
    suspect_reason: str | None
    suspect_class: str | None
    """What would help: `reset`, `reboot`, `replace`, `drain`, `watch` or `report`."""
    is_excluded: bool | None
    """Whether the last decision excludes it; see `excluded_until_at`."""
    excluded_at: datetime | None
    excluded_until_at: datetime | None
    excluded_by: str | None
    excluded_reason: str | None
    spared_at: datetime | None
    """When the node would have been excluded, had health not been in observe mode."""
    spared_reason: str | None
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
    probes: list[ProbeNow]
    """The checks that run in short intervals, as the agent reported at most ten seconds ago; empty
    when the agent is silent."""
    clock_offset_s: float | None
    """How far its clock is ahead of the clock of history, less than 0 if it is behind: from the
    beats of the last minute that came fastest. Null when it is not heard, and for the first half
    minute."""
    is_clock_wrong: bool
    """`clock_offset_s` is beyond `clock_offset_limit_s` in [history]: the times of its facts
    mislead."""


class CheckOut(Answer):
    """The result of one check of one part of a node."""

    check: str = Field(examples=["gpu"])
    state: str = Field(description="`ok`, `warning`, `failed`, `unknown` or `unsupported`.")
    reason: str
    subject: str = Field(description="The part of the node that the result is about.")
    failure_class: str
    code: str = Field(description="The code that the part itself reports.", examples=["XID 79"])
    took_s: float
    nvlink_domain: str = Field("", description="The NVLink domain of a GPU; empty for none.")


class Examination(Answer):
    """The results of all checks that ran together on a node."""

    n: int = Field(description="The place of the fact in the log.")
    id: str = Field(description="The id of the fact.")
    node: str
    job: str
    at: datetime
    occasion: str
    """`join`, `periodic`, `prolog`, `incident`, `operator`, or `probe`: a check that runs in short
    intervals has failed, still fails, or passes again."""
    is_healthy: bool | None = Field(description="Null if no check had a result.")
    took_s: float
    checks: list[str] | None = Field(description="The names of all checks that ran.")
    results: list[CheckOut] | None
    """The result of each; when all is well, only those that are not `ok`."""
    policy: str | None
    """For a probe: `observe`, `end_round` or `exclude`; null for an examination."""
    failures: int | None
    """For a probe: in how many runs in a row it has failed; 0 when it passes again."""
    is_acted_on: bool | None
    """For a probe: a round was ended for this failure, since other nodes pass the check."""


class Standing(Answer):
    """The present judgement of health about a node."""

    state: str = Field(description="`healthy`, `suspect`, `lost`, `excluded` or `unknown`.")
    reason: str
    strikes: int
    silence_s: float | None
    failing: list[CheckOut]


class NodeNow(Answer):
    """A node, from the last beat of its agent."""

    job: str
    state: str = Field(description="The state of the agent.", examples=["running"])
    round: int | None
    slot: int | None
    ranks: int
    watch: str | None = Field(description="`armed`, `learning`, `paused` or `off`.")
    facts_waiting: int = Field(description="Facts that the stream has not acknowledged.")
    probes_failed: list[str]
    """Checks that run in short intervals during a training, and have failed."""
    probe_cpu_ratio: float
    """Processor time of those checks since the agent started, 1 for a whole core."""
    heard_age_s: float = Field(description="The age of the last beat, by the clock of history.")
    is_stale: bool


class NodeDetail(Node):
    """A node, with its present state."""

    standing: Standing | None
    """The judgement of health; null while health does not answer."""
    standing_missing: str | None = Field(description="Why there is no judgement.")
    now: NodeNow | None = Field(description="The last beat of its agent; null if no beat arrives.")
    last_check: Examination | None
