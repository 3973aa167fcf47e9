"""Live ranks, limits and switches, as REST shows them."""

from datetime import datetime

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer, PageOf


class RankNow(Answer):
    """A rank, from the last beat of its agent. Ages are those of that moment."""

    rank: int
    node: str
    slot: int | None
    state: str = Field(description="`starting`, `running`, `paused`, `stalled` or `exited`.")
    step: int | None = Field(description="The last step that it finished in this round.")
    section: str | None = Field(description="The innermost section that is open.")
    section_age_s: float = Field(description="Since it was entered.")
    progress_age_s: float = Field(description="Since its last progress.")
    limit_s: float | None = Field(
        description="How long it may make no progress there; null while no limit applies."
    )
    limit_source: str | None = Field(
        description="`learned`, `configured`, `default`, `floor` or `cap`."
    )
    collectives: int | None = Field(
        description="Entered in this round when it was last asked; only ranks whose pages show "
        "nothing are asked."
    )
    resident_bytes: int | None
    device_bytes: int | None
    heard_age_s: float = Field(
        description="Since the last beat of its node, by the clock of history."
    )
    is_stale: bool = Field(description="The beat is too old to show the present state.")


class Ranks(PageOf[RankNow]):
    """Ranks of the newest round, and whether this is their present state."""

    round: int | None = Field(description="Null while no ranks are heard of.")
    states: dict[str, int] = Field(
        description="How many ranks there are in each state, on all pages."
    )
    is_stale: bool = Field(description="Some of it, or all, is not the present state.")
    note: str | None = Field(description="Why it is stale, or why there are none.")
    silent_nodes: list[str] = Field(
        description="Nodes of the round that are not heard; 100 of them."
    )


class LimitOut(Answer):
    """How long a rank may go without progress in a section."""

    section: str = Field(
        description="`outside` for the time outside all sections, `first-step` for everything up "
        "to the end of a round's first step, `step` and `heartbeat` for the time from one to the "
        "next."
    )
    limit_s: float
    source: str = Field(
        description="`learned`, `configured`, `default`, `floor` or `cap`: the rule that set it."
    )
    why: str = Field(description="The numbers that went into it.")
    longest_s: float | None = Field(description="The longest that was seen on any rank.")
    observations: int
    kind: str | None = Field(description="`plain`, `checkpoint`, `evaluation` or `heartbeat`.")
    origin: str | None = Field(
        default=None, description="How a person has set it: by an option, a setting, a command."
    )


class Limits(Answer):
    """The limits that can act on a job's ranks.

    While ranks run, their agents say which; else these are what was learned and set.
    """

    job: str
    limits: list[LimitOut]
    rule: str | None = Field(description="How limits are learned, and since when.")
    round: int | None = Field(description="The round that was observed last.")
    config_fingerprint: str | None = Field(description="The configuration that they hold for.")
    is_live: bool = Field(
        description="Agents or health have just reported it; otherwise it is the newest on record."
    )
    at: datetime | None = Field(description="When that was recorded; null for live ones.")
    note: str | None = Field(description="Why they are not live, or why there are none.")


class ExclusionOut(Answer):
    """A node that may not join."""

    node: str
    by: str
    reason: str
    until_at: datetime | None = Field(description="Null for no end.")


class Switches(Answer):
    """What was switched at run time, for all jobs or for one."""

    job: str | None = Field(description="Null for those of all jobs.")
    is_braked: bool = Field(description="The brake is on: every actuator only observes.")
    braked_by: str | None = Field(description="Who pulled the brake; null while it is off.")
    brake_reason: str | None = Field(description="Why they did.")
    modes: dict[str, str] = Field(
        description="`observe` or `enforce`, by actuator; what is not here has its default.",
        examples=[{"exclude": "enforce"}],
    )
    settings: dict[str, str] = Field(description="By dotted name.")
    exclusions: list[ExclusionOut]
    changed_by: str | None
    reason: str | None
    revision: int = Field(description="The revision of the document; 0 while there is none.")


class SwitchInForce(Answer):
    """What holds of one switch."""

    name: str = Field(examples=["straggler.window_s"])
    value: str = Field(description="As an operator would write it.")
    source: str = Field(
        description="`default`, `settings` of the service, `control` for all jobs, `control of "
        "the job`, or `brake`."
    )


class SwitchesInForce(Answer):
    """All switches of slow ranks, for a job or for those that have none of their own."""

    job: str | None
    switches: list[SwitchInForce]


class Control(Answer):
    """Every switch that is in force, as the bus holds it now."""

    cluster: Switches
    jobs: list[Switches] = Field(description="Jobs that have some of their own.")
    breaker_opened_at: datetime | None = Field(
        description="Since when health excludes no more nodes by itself; null while it may."
    )
    distrusted_checks: list[str] = Field(
        description="Checks that fail on too many nodes to count against any of them."
    )
