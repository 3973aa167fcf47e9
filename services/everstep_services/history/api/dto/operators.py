"""The bodies of requests of operators, and the answer to them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from everstep.verdict_causes import VerdictCause
from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.api.http.parameters import LARGEST, NAME, TEXT


class RequestBody(BaseModel):
    """The reason and the person, the same in all requests."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field(
        "no reason given",
        min_length=1,
        max_length=1000,
        pattern=TEXT,
        description="Why, for the record.",
        examples=["the learning rate is too high"],
    )
    user: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        pattern=TEXT,
        description="The name of the person who asks; recorded together with the token's name.",
        examples=["ann@login-1"],
    )

    def details(self) -> dict[str, Any]:
        """The fields that belong to this request alone."""
        return self.model_dump(exclude={"reason", "user", "job"})


class SaveWanted(RequestBody):
    """A save at the next step."""


class StopWanted(RequestBody):
    """The end of a job."""

    save_first: bool = Field(
        default=True, description="The ranks get `save_within_s` of rendezvous to save."
    )


class RestartWanted(RequestBody):
    """Another round."""

    save_first: bool = Field(
        default=False, description="The ranks get `save_within_s` of rendezvous to save."
    )
    round: int | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="The round that is meant: another one is not touched, so asking again is "
        "harmless. Null for whichever runs.",
    )
    without_nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=1000, description="Nodes that leave the job with it."
    )


class DrainWanted(RequestBody):
    """A node that should leave."""

    job: str | None = Field(
        None, pattern=NAME, description="Its job; null for the one that it takes part in."
    )
    within_s: float | None = Field(
        None, ge=0, le=86400, description="How long the ranks have to save first; null for none."
    )


class ExclusionWanted(RequestBody):
    """A node that must not join."""

    ttl_s: float | None = Field(
        None,
        ge=0,
        le=366 * 86400,
        description="How long; null for the time in health's settings, 0 until somebody includes "
        "it again.",
    )
    force: bool = Field(
        default=False, description="Also a node that is not on record, before it first joins."
    )

    def details(self) -> dict[str, Any]:
        """The fields that belong to this request alone, without what only REST checks."""
        return {"ttl_s": self.ttl_s}


class InclusionWanted(RequestBody):
    """A node that may join again."""


class ChecksWanted(RequestBody):
    """Checks of a node, which come as facts."""

    job: str | None = Field(
        None, pattern=NAME, description="Its job; null for the one that it takes part in."
    )
    checks: tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=TEXT)], ...] = Field(
        (),
        strict=False,
        max_length=100,
        description="The checks to run; none for all that may run during a training.",
        examples=[["gpu", "storage"]],
    )


class MeasurementWanted(RequestBody):
    """A test of the network between nodes of a job, whose figures come as facts."""

    nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=4096, description="Nodes; none for all that are present."
    )
    partners: int = Field(
        8, ge=1, le=64, description="With how many others each node measures, at most."
    )
    is_beside_training: bool = Field(
        default=False, description="Also on nodes whose ranks run, which slows them."
    )
    test: str | None = Field(
        None,
        pattern="^[0-9a-f]{32}$",
        description="The id for the test, as `test` in each `network_measured`; null "
        "for a new one.",
    )


class CaptureWanted(RequestBody):
    """Evidence of ranks that go on, which comes as facts."""

    evidence: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (),
        strict=False,
        max_length=32,
        description="Kinds of evidence; none for all that its agents know.",
        examples=[["stacks", "flight_recorder"]],
    )
    ranks: tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...] = Field(
        (), strict=False, max_length=4096, description="Of these global ranks; none for all."
    )
    within_s: float = Field(
        10.0,
        gt=0,
        le=60,
        description="Evidence that has not arrived by then is recorded as missing.",
    )
    capture: str | None = Field(
        None,
        pattern="^[0-9a-f]{32}$",
        description="The id for the capture: `incident` of each `evidence_collected` "
        "is `capture-` and this id; null for a new one.",
    )


class LimitWanted(RequestBody):
    """How long a section may take before its rank has stalled."""

    limit_s: float = Field(gt=0, le=366 * 86400, description="The limit.", examples=[30.0])


class ControlWanted(RequestBody):
    """Switches to change."""

    job: str | None = Field(None, pattern=NAME, description="For this job; null for all of them.")
    changes: dict[
        Annotated[str, Field(min_length=1, max_length=128, pattern=TEXT)],
        Annotated[str, Field(max_length=256, pattern=TEXT)],
    ] = Field(
        min_length=1,
        max_length=100,
        description="By dotted name; an empty value goes back to the default.",
        examples=[{"modes.exclude": "enforce"}],
    )


class CheckpointWanted(RequestBody):
    """Something done about a checkpoint."""

    tier: str = Field("global", pattern="^(global|memory|peer)$", description="Where.")


class ScanWanted(RequestBody):
    """The index compared with the files."""

    root: str = Field(
        "",
        max_length=1024,
        pattern=TEXT,
        description="A folder or URL, as the catalog sees it; empty for all that it knows.",
        examples=["s3://bucket/llama"],
    )


class CollectionWanted(RequestBody):
    """What retention does not keep, deleted."""

    keep_last: int | None = Field(
        None,
        ge=1,
        le=LARGEST,
        description="How many of the newest to keep; null as the catalog is set to.",
    )
    keep_every_steps: int | None = Field(
        None, ge=0, le=LARGEST, description="Keep each step that is a multiple; null as set."
    )
    is_dry_run: bool = Field(default=True, description="Only list what would be deleted.")


class CorrectionWanted(RequestBody):
    """What a person knows about the cause of an incident."""

    reason: str = Field(
        min_length=1,
        max_length=1000,
        pattern=TEXT,
        description="How they know, for the record.",
        examples=["the fan of this node had stopped"],
    )
    cause: VerdictCause = Field(description="The right cause class.")
    culprit_ranks: tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...] = Field(
        (), strict=False, max_length=256, description="The ranks that caused it."
    )
    culprit_nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=64, description="The nodes that caused it."
    )


class BrakeWanted(RequestBody):
    """The brake, which leaves every actuator only observing."""

    is_on: bool = Field(description="True pulls the brake, false releases it.")
    job: str | None = Field(None, pattern=NAME, description="For this job; null for all of them.")


class Decided(Answer):
    """What was decided. What it leads to comes as facts."""

    job: str | None = Field(description="Null when it is about no job.")
    action: str = Field(examples=["stop"])
    node: str | None = Field(description="The node that it is about, if any.")
    by: str = Field(description="Who asked, as it is on record.", examples=["ann@login-1 (ops)"])
    text: str = Field(
        description="What happens now.",
        examples=[
            "round 4 ends; another round follows, and does not count against the restart budget"
        ],
    )
