"""The parameters of tools: what each means, and within which limits."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from everstep_services.cli.mcp_server.source import PAGE_MOST

_NAME = "^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$"

Job = Annotated[str, Field(pattern=_NAME, description="The job's id, as list_jobs shows it.")]
AnyJob = Annotated[
    str | None, Field(pattern=_NAME, description="Only of this job; null for all jobs.")
]
Node = Annotated[str, Field(pattern=_NAME, description="The node's id, as list_nodes shows it.")]
AnyNode = Annotated[str | None, Field(pattern=_NAME, description="Only of this node.")]
Incident = Annotated[
    str, Field(pattern=_NAME, description="The incident's id, or at least 8 characters of it.")
]
Named = Annotated[
    str | None, Field(pattern=_NAME, description="A job or an incident; null for the newest job.")
]
Limit = Annotated[int, Field(ge=1, le=PAGE_MOST, description=f"The most items, 1 to {PAGE_MOST}.")]
Cursor = Annotated[
    str | None,
    Field(max_length=4096, description="`next` of the page before, with the same filters."),
]
Text = Annotated[str | None, Field(max_length=256)]
Round = Annotated[int | None, Field(ge=0, le=2**31, description="The round; null for the newest.")]
Rank = Annotated[int | None, Field(ge=0, le=2**31, description="Only of this global rank.")]
Step = Annotated[int, Field(ge=0, le=2**53, description="The step of the checkpoint.")]
Stream = Annotated[Literal["stdout", "stderr"] | None, Field(description="Only of this stream.")]
Moment = Annotated[datetime | None, Field(description="RFC 3339, as in 2026-11-26T04:00:00Z.")]
Tier = Annotated[
    Literal["global", "memory", "peer"] | None, Field(description="Only in this tier.")
]
Reason = Annotated[
    str, Field(min_length=1, max_length=1000, description="Why, for the record. People read it.")
]


def moment(value: datetime | None) -> str | None:
    """As the API takes it."""
    return None if value is None else value.isoformat()
