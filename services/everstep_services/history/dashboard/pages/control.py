"""`/control`: switches in force, the brake, exclusions, and how this replica is."""

from starlette.requests import Request

from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.rest import Reader, together


async def overview(reader: Reader, _request: Request) -> Page:
    """Everything that people can switch, and who switched it last."""
    control, straggler, status, tokens = await together(
        reader.get_live("control"),
        reader.get_live("control/straggler"),
        reader.get_or_not("status"),
        reader.get_or_not("tokens", limit=100),
    )
    values = {"title": "Control", "live": "", "control": control, "straggler": straggler,
              "service": status, "tokens": tokens}  # fmt: skip
    return Page("control.html", values)
