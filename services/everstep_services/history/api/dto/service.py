"""Facts, tokens, and the service itself, as REST shows them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.store.tokens import Scope
from everstep_services.history.api.dto.answer import Answer


class FactOut(Answer):
    """One fact, as it was sent, and its place in the log."""

    n: int = Field(description="Its place in the log, which orders everything here.")
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

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[^\x00-\x1f\x7f]*$",
        description="Whose it is.",
        examples=["dashboard"],
    )
    scope: Scope = Field("read", description="Each allows what those before it allow.")
    expires_in_s: int | None = Field(None, ge=1, le=10 * 366 * 86400, description="Null for never.")


class LoginCode(Answer):
    """A way into the dashboard, for one browser."""

    code: str = Field(description="Valid once.")
    path: str = Field(description="Open it on this host; `&next=/jobs/…` leads to another page.")
    lasts_s: float = Field(description="How long it is valid.")


class BundleOut(Answer):
    """What a bundle is."""

    job: str
    exported_at: datetime | None = Field(description="Null in a bundle of an older release.")
    version: str | None = Field(description="The release that exported it.")
    evidence_missing: int | None = Field(description="Pieces of evidence that it lacks.")


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
    bundle: BundleOut | None = Field(
        None, description="What is served is an exported bundle: read-only, and never live."
    )
