"""`/notifications`: whether messages to people arrive."""

import logging

from fastapi import APIRouter

from everstep_services.history.api.context import Ctx, Operator
from everstep_services.history.api.dto.notifications import (
    NotificationTest,
    NotificationTestWanted,
    TargetAnswered,
)
from everstep_services.history.api.http.problems import ProblemError, responses

log = logging.getLogger(__name__)
router = APIRouter(tags=["operators"])


@router.post("/notifications/test", summary="Send a test message", responses=responses(409))
async def test_notifications(
    context: Ctx, by: Operator, wanted: NotificationTestWanted
) -> NotificationTest:
    """Send a test message to the targets that are set in `[notify]`, and say what they answer."""
    log.info("notifications_tested target=%s token=%s", wanted.target or "all", by.id)
    targets = None if wanted.target is None else (wanted.target,)
    answers = await context.notifications.test(targets)
    if not answers:
        target = "a target" if wanted.target is None else wanted.target
        raise ProblemError(
            409, "not_set", f"{target} is not set in [notify]: see the guide on notifications"
        )
    return NotificationTest(
        targets=[
            TargetAnswered(target=answer.target, is_taken=answer.is_taken, text=answer.text)
            for answer in answers
        ]
    )
