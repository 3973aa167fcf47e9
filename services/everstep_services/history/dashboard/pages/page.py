"""What a page hands to its template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Page:
    """A template, and what it shows."""

    template: str
    values: Mapping[str, Any]
    status: int = 200
    media_type: str = "text/html"


def filters(request: Request, *names: str) -> dict[str, str]:
    """The filters of a list that the URL gives, without empty ones."""
    given = {name: request.query_params.get(name, "") for name in names}
    return {name: value for name, value in given.items() if value}


def without_cursor(request: Request) -> str:
    """The question of a list, for the links to its other pages."""
    items = [(k, v) for k, v in request.query_params.multi_items() if k != "cursor" and v]
    return urlencode(items)


def whole(text: str | None, default: int, most: int) -> int:
    """A number from a URL, within bounds; the default for whatever is none."""
    if text is None or not text.isdecimal() or len(text) > 18:
        return default
    return min(int(text), most)
