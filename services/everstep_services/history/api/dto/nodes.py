"""Nodes, as REST shows them."""

from datetime import datetime

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer


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
