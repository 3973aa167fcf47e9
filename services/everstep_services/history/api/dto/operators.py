"""The bodies of requests of operators, and the answer to them."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from everstep.messages.questions.health import LEAST_LIMIT_S, MOST_LIMIT_S
from everstep.verdict_causes import VerdictCause
from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.api.http.parameters import LARGEST, NAME, TEXT, RequestModel
from everstep_services.history.notifications.settings import Target


class RequestBody(RequestModel):
    """The reason and the person, the same in all requests."""

    model_config = ConfigDict(strict=True)

    reason: str = Field(
        "no reason given",
        min_length=1,
        max_length=1000,
        pattern=TEXT,
        examples=["the learning rate is too high"],
    )
    """The reason, for the record."""
    user: str | None = Field(
        None, min_length=1, max_length=128, pattern=TEXT, examples=["ann@login-1"]
    )
    """The name of the person who asks; recorded together with the token's name."""

    def details(self) -> dict[str, Any]:
        """The fields that belong to this request alone."""
        return self.model_dump(exclude={"reason", "user", "job"})


class SaveWanted(RequestBody):
    """A request for a save at the next step."""


class StopWanted(RequestBody):
    """A request to stop a job."""

    save_first: bool = True
    """The ranks get `save_within_s` of rendezvous to save."""


class RestartWanted(RequestBody):
    """A request for another round."""

    save_first: bool = False
    """The ranks get `save_within_s` of rendezvous to save."""
    round: int | None = Field(None, ge=0, le=LARGEST)
    """The round to end: if another one runs, nothing happens, so a repeated request is harmless.
    Null for the present round."""
    without_nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=1000
    )
    """Nodes that leave the job at this restart."""


class DrainWanted(RequestBody):
    """A request to take a node out of its job."""

    job: str | None = Field(None, pattern=NAME)
    """The job of the node; null for the job that it takes part in."""
    within_s: float | None = Field(None, ge=0, le=86400)
    """How long the ranks have to save first; null to end the round at once."""


class ExclusionWanted(RequestBody):
    """A request to exclude a node."""

    ttl_s: float | None = Field(None, ge=0, le=366 * 86400)
    """How long it lasts; null for the time in health's settings, 0 until somebody includes the node
    again."""
    force: bool = False
    """Exclude the node even if it is not on record because it has never joined."""

    def details(self) -> dict[str, Any]:
        """The fields that belong to this request alone, without what only REST checks."""
        return {"ttl_s": self.ttl_s}


class InclusionWanted(RequestBody):
    """A request to end the exclusion of a node."""


class ChecksWanted(RequestBody):
    """A request for checks of a node, whose results arrive as facts."""

    job: str | None = Field(None, pattern=NAME)
    """The job of the node; null for the job that it takes part in."""
    checks: tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=TEXT)], ...] = Field(
        (), strict=False, max_length=100, examples=[["gpu", "storage"]]
    )
    """The checks to run; an empty list for all that may run during a training."""


class MeasurementWanted(RequestBody):
    """A test of the network between nodes of a job, whose figures come as facts."""

    nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=4096
    )
    """The nodes; an empty list for all that are present."""
    partners: int = Field(8, ge=1, le=64)
    """The most other nodes that each node measures with."""
    is_beside_training: bool = False
    """Also on nodes whose ranks run, which slows them."""
    test: str | None = Field(None, pattern="^[0-9a-f]{32}$")
    """The id for the test, as `test` in each `network_measured`; null for a new one."""


class CaptureWanted(RequestBody):
    """A capture of evidence of running ranks, which arrives as facts."""

    evidence: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=32, examples=[["stacks", "flight_recorder"]]
    )
    """The kinds of evidence; an empty list for all that the agents know."""
    ranks: tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...] = Field(
        (), strict=False, max_length=4096
    )
    """Global ranks; an empty list for all."""
    within_s: float = Field(10.0, gt=0, le=60)
    """Evidence that has not arrived by then is recorded as missing."""
    capture: str | None = Field(None, pattern="^[0-9a-f]{32}$")
    """The id for the capture: `incident` of each `evidence_collected` is `capture-` and this id;
    null for a new one."""


class LimitWanted(RequestBody):
    """How long a section may take before its rank has stalled."""

    limit_s: float = Field(ge=LEAST_LIMIT_S, le=MOST_LIMIT_S, examples=[30.0])
    """The limit."""


class ControlWanted(RequestBody):
    """Switches to change."""

    job: str | None = Field(None, pattern=NAME, description="The job; null for all jobs.")
    changes: dict[
        Annotated[str, Field(min_length=1, max_length=128, pattern=TEXT)],
        Annotated[str, Field(max_length=256, pattern=TEXT)],
    ] = Field(min_length=1, max_length=100, examples=[{"modes.exclude": "enforce"}])
    """The values by dotted name; an empty value restores the default."""


class CheckpointWanted(RequestBody):
    """An action on a checkpoint."""

    tier: str = Field("global", pattern="^(global|memory|peer)$")
    """The tier of the checkpoint."""


class ScanWanted(RequestBody):
    """A request to compare the index with the files."""

    root: str = Field("", max_length=1024, pattern=TEXT, examples=["s3://bucket/llama"])
    """A folder or URL, as the catalog sees it; empty for all known places."""


class CollectionWanted(RequestBody):
    """A request to delete what retention does not keep."""

    keep_last: int | None = Field(None, ge=1, le=LARGEST)
    """How many of the newest checkpoints to keep; null for the catalog's setting."""
    keep_every_steps: int | None = Field(None, ge=0, le=LARGEST)
    """Also keep each step that is a multiple of this; null for the catalog's setting."""
    is_dry_run: bool = Field(default=True, description="Only list what would be deleted.")


class CorrectionWanted(RequestBody):
    """What a person knows about the cause of an incident."""

    reason: str = Field(
        min_length=1, max_length=1000, pattern=TEXT, examples=["the fan of this node had stopped"]
    )
    """How the person knows, for the record."""
    cause: VerdictCause = Field(description="The right cause class.")
    culprit_ranks: tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...] = Field(
        (), strict=False, max_length=256
    )
    """The ranks that caused it."""
    culprit_nodes: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (), strict=False, max_length=64
    )
    """The nodes that caused it."""


class BrakeWanted(RequestBody):
    """The brake: with it, Everstep only restarts rounds that have failed."""

    is_on: bool = Field(description="True pulls the brake, false releases it.")
    job: str | None = Field(None, pattern=NAME, description="The job; null for all jobs.")


class Decided(Answer):
    """The decision. Its consequences arrive as facts."""

    job: str | None = Field(description="The job; null if the decision is about no job.")
    action: str = Field(examples=["stop"])
    node: str | None = Field(description="The node that the decision is about; null for none.")
    by: str = Field(examples=["ann@login-1 (ops)"])
    """The person and token that asked, as recorded."""
    text: str = Field(
        examples=[
            "round 4 ends; another round follows, and does not count against the restart budget"
        ]
    )
    """The next step, in a sentence."""


class NotificationTestWanted(RequestModel):
    """A test message."""

    model_config = ConfigDict(strict=True)

    target: Target | None = Field(None, description="The target; null for all that are set.")


class TargetAnswered(Answer):
    """What one target answered."""

    target: Target
    is_taken: bool = Field(description="True if the target has accepted the message.")
    text: str = Field(description="The HTTP status of the target, or why there is none.")


class NotificationTest(Answer):
    """What the targets answered."""

    targets: list[TargetAnswered]
