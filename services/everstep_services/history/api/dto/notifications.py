"""A test of notifications, as REST takes it, and what each target answered."""

from pydantic import BaseModel, ConfigDict, Field

from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.notifications.settings import Target


class NotificationTestWanted(BaseModel):
    """A test message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    target: Target | None = Field(None, description="The target; null for all that are set.")


class TargetAnswered(Answer):
    """What one target answered."""

    target: Target
    is_taken: bool = Field(description="True if the target has accepted the message.")
    text: str = Field(description="The HTTP status of the target, or why there is none.")


class NotificationTest(Answer):
    """What the targets answered."""

    targets: list[TargetAnswered]
