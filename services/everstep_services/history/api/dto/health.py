"""Live ranks, limits and switches, as REST shows them."""

from datetime import datetime

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer, PageOf


class RankNow(Answer):
    """A rank, from the last beat of its agent. Ages are those of that moment."""

    rank: int
    node: str
    slot: int | None
    state: str
    """`starting` until its script runs, `running`, `paused`, `stalled` or `exited`."""
    step: int | None = Field(description="The last step that it finished in this round.")
    section: str | None = Field(description="The innermost section that is open.")
    section_age_s: float = Field(description="How long the rank has been in this section.")
    progress_age_s: float | None
    """The time since the rank's last progress; null before its first step."""
    limit_s: float | None
    """How long the rank may make no progress there; null while no limit applies."""
    limit_source: str | None
    """`learned`, `configured`, `default`, `floor` or `cap`."""
    limit_name: str | None
    """The name of the limit, if it is not that of the section, as `first-step`."""
    collectives: int | None
    """The number of collectives that the rank has entered in this round; only counted for ranks
    whose pages show no progress."""
    resident_bytes: int | None
    device_bytes: int | None
    heard_age_s: float
    """The age of the last beat of its node, by the clock of history."""
    is_stale: bool = Field(description="True if the beat is too old to show the present state.")


class Ranks(PageOf[RankNow]):
    """Ranks of the newest round, and whether this is their present state."""

    round: int | None = Field(description="The round; null while no beat reports a rank.")
    states: dict[str, int] = Field(description="The number of ranks in each state, over all pages.")
    is_stale: bool = Field(description="True if part of the answer is not the present state.")
    note: str | None = Field(description="Why the answer is stale, or why there are no ranks.")
    silent_nodes: list[str]
    """Nodes of the round that send no beats; at most 100."""


class LimitOut(Answer):
    """How long a rank may go without progress in a section."""

    section: str
    """`outside` for the time outside all sections, `first-step` for everything up to the end of a
    round's first step, `step` and `heartbeat` for the time from one to the next."""
    limit_s: float
    source: str
    """`learned`, `configured`, `default`, `floor` or `cap`: the rule that set it."""
    why: str = Field(description="The numbers that the limit was computed from.")
    longest_s: float | None = Field(description="The longest time that was observed on any rank.")
    observations: int
    kind: str | None = Field(description="`plain`, `checkpoint`, `evaluation` or `heartbeat`.")
    origin: str | None = None
    """How a person has set it: by an option, a setting or a command."""


class Limits(Answer):
    """The limits that can act on a job's ranks.

    While ranks run, these are the limits that their agents report; otherwise those that were
    learned and set.
    """

    job: str
    limits: list[LimitOut]
    rule: str | None = Field(description="How limits are learned, and since when.")
    round: int | None = Field(description="The round that was observed last.")
    config_fingerprint: str | None
    """The configuration that these limits apply to."""
    is_live: bool
    """Agents or health have just reported the limits; otherwise these are the newest on record."""
    at: datetime | None = Field(description="When these limits were recorded; null for live ones.")
    note: str | None = Field(description="Why the limits are not live, or why there are none.")


class ExclusionOut(Answer):
    """A node that may not join a round."""

    node: str
    by: str
    reason: str
    until_at: datetime | None = Field(description="When the exclusion ends; null for no end.")


class Switches(Answer):
    """What was switched at run time, for all jobs or for one."""

    job: str | None = Field(description="The job; null for the switches of all jobs.")
    is_braked: bool
    """The brake is on: Everstep ends no round in which all ranks live, and stops, excludes and
    deletes nothing; rounds that failed are still restarted."""
    braked_by: str | None = Field(description="Who pulled the brake; null while it is off.")
    brake_reason: str | None = Field(description="Why the brake was pulled.")
    modes: dict[str, str] = Field(examples=[{"exclude": "enforce"}])
    """`observe` or `enforce`, by actuator; those that are missing have their default."""
    settings: dict[str, str] = Field(description="By dotted name.")
    exclusions: list[ExclusionOut]
    changed_by: str | None
    reason: str | None
    revision: int = Field(description="The revision of the document; 0 while there is none.")


class SwitchInForce(Answer):
    """The value of one switch."""

    name: str = Field(examples=["straggler.window_s"])
    value: str = Field(description="The value, as an operator would write it.")
    source: str
    """`default`, `settings` of the service, `control` for all jobs, `control of the job`, or
    `brake`."""


class SwitchesInForce(Answer):
    """All switches of slow ranks, for a job or for those that have none of their own."""

    job: str | None
    switches: list[SwitchInForce]


class Control(Answer):
    """Every switch that is in force, as the bus holds it now."""

    cluster: Switches
    jobs: list[Switches] = Field(description="Jobs with switches of their own.")
    breaker_opened_at: datetime | None
    """Since when the breaker is open, so that health excludes no more nodes; null while it is
    closed."""
    distrusted_checks: list[str]
    """Checks that fail on too many nodes to count against any of them."""
