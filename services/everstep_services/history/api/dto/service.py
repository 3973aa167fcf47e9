"""Facts, tokens, and the service itself, as REST shows them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from everstep.store.tokens import Scope
from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.api.http.parameters import RequestModel


class FactOut(Answer):
    """One fact, as it was sent, and its place in the log."""

    n: int = Field(description="The fact's place in the log, which orders everything here.")
    id: str
    job: str = Field(description="The job that the fact is about, or `_cluster`.")
    kind: str = Field(examples=["rank_exited"])
    round: int | None
    node: str | None
    at: datetime = Field(description="When the event happened, by the sender's clock.")
    source: str = Field(examples=["agent/node-07"])
    received_at: datetime = Field(description="When the fact arrived, by the clock of history.")
    body: dict[str, Any] = Field(description="The content of the fact.")


class TokenOut(Answer):
    """A token without its text."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    """When the token was last used, to the half minute."""
    revoked_at: datetime | None


class NewToken(TokenOut):
    """A token with its text."""

    token: str = Field(description="The text of the token. Keep it: it is shown only now.")


class TokenWanted(RequestModel):
    """A request for a new token."""

    model_config = ConfigDict(strict=True)

    name: str = Field(
        min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$", examples=["dashboard"]
    )
    """The person or program that the token is for."""
    scope: Scope = Field("read", description="Each allows what those before it allow.")
    expires_in_s: int | None = Field(None, ge=1, le=10 * 366 * 86400)
    """The seconds until it expires; null for never."""


class LoginCode(Answer):
    """A code that logs one browser in to the dashboard."""

    code: str = Field(description="The code, which works once.")
    path: str
    """The path to open on this host; `&next=/jobs/…` leads to another page."""
    lasts_s: float = Field(description="How long the code is valid.")


class BundleOut(Answer):
    """What a bundle is."""

    job: str
    exported_at: datetime | None
    """When the bundle was exported; null in a bundle of an older release."""
    version: str | None = Field(description="The release that exported it.")
    evidence_missing: int | None = Field(description="Pieces of evidence that it lacks.")


class WrongClock(Answer):
    """A node whose clock differs from the clock of history by more than the setting allows."""

    node: str
    offset_s: float = Field(description="How far it is ahead; less than 0 if it is behind.")


class Status(Answer):
    """The state of this replica and of the record."""

    version: str
    epoch: str
    """The id of this database; in another one, facts have other places."""
    schema_version: str = Field(description="The version of the database schema.")
    last_n: int = Field(description="The place of the last fact in the log.")
    projected_n: int = Field(description="The place of the last fact that the tables contain.")
    is_rebuilding: bool = Field(description="True while the tables lag behind the log.")
    stream: str | None = Field(description="The incarnation of the stream that is read.")
    stream_sequence: int | None
    stream_read_at: datetime | None = Field(description="When facts were last written.")
    is_projecting: bool = Field(description="This replica is the one that writes.")
    is_bus_connected: bool
    database: Literal["sqlite", "postgresql"]
    listeners: int = Field(description="Open live streams on this replica.")
    wrong_clocks: list[WrongClock]
    """The nodes that are heard and whose clocks are wrong, the worst first, at most 20. If these
    are all nodes, the clock of this replica is wrong."""
    bundle: BundleOut | None = None
    """The exported bundle that is served, read-only and never live; null for a live record."""
