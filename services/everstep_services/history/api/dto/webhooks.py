"""Notices of maintenance, as REST shows them."""

from dataclasses import asdict
from datetime import datetime
from typing import Literal

from pydantic import Field

from everstep.store.maintenance import MaintenanceNotice
from everstep_services.history.api.dto.answer import Answer, present
from everstep_services.history.api.http.parameters import TEXT, RequestModel


class MaintenanceOut(Answer):
    """What a sender has announced about a node, and what became of it."""

    sender: str = Field(description="The name of its token.")
    id: str
    node: str
    action: str = Field(description="`drain` or `exclude`.")
    starts_at: datetime
    ends_at: datetime | None
    reason: str
    state: Literal["waiting", "done", "observed", "refused", "failed", "cancelled"]
    outcome: str = Field(description="What was done, or why nothing was done.")
    received_at: datetime
    attempts: int = Field(description="The number of attempts; attempts are repeated for an hour.")


class WebhookTaken(Answer):
    """What was done about a message."""

    notices: list[MaintenanceOut]
    stale: int
    """How many notices the message did not change, because they are over, or a newer message had
    arrived."""
    ignored: list[str] = Field(description="The parts that are not about maintenance, and why.")


class MaintenanceCancelled(RequestModel):
    """Why a person cancels a notice."""

    reason: str = Field("no reason given", min_length=1, max_length=1000, pattern=TEXT)
    """The reason, for the record."""


def shown(notice: MaintenanceNotice) -> MaintenanceOut:
    """A notice as REST shows it."""
    return MaintenanceOut(**present(asdict(notice)))
