"""`/runbooks/…`: what to do about a cause, as the documentation has it."""

import re
from importlib import resources
from pathlib import Path

from starlette.requests import Request

from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.rest import Reader, RestError

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


async def one(_reader: Reader, request: Request) -> Page:
    """A runbook: its title, and its lines."""
    text = _RUNBOOKS.get(request.path_params["name"])
    if text is None:
        raise RestError(404, "no runbook has this name")
    title, *lines = _LINK.sub(r"\1", text.replace("**", "")).splitlines()
    values = {"title": title.lstrip("# "), "lines": [line for line in lines if line]}
    return Page("runbook.html", values)


def of_cause(cause: str | None) -> str | None:
    """The name of the runbook for a cause; None if there is none."""
    name = f"cause-{(cause or 'unknown').replace('_', '-')}"
    return name if name in _RUNBOOKS else None


def _runbooks() -> dict[str, str]:
    """All runbooks: of the installed package, or of the source tree."""
    installed = resources.files("everstep_services") / "runbooks"
    folder = installed if installed.is_dir() else Path(__file__).parents[5] / "docs/runbooks"
    if not folder.is_dir():
        return {}
    files = (file for file in folder.iterdir() if file.name.endswith(".md"))
    return {file.name.removesuffix(".md"): file.read_text() for file in files}


_RUNBOOKS = _runbooks()
