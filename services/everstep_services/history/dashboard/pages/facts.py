"""`/facts`: the log itself, live."""

import json

from starlette.requests import Request

from everstep_services.history.dashboard.pages.page import Page, filters
from everstep_services.history.dashboard.rest import Reader, path_of


async def listed(reader: Reader, request: Request) -> Page:
    """The newest facts first, with filters in the URL."""
    given = filters(request, "job", "kind", "node", "round", "source", "since", "until", "cursor")
    facts = await reader.get("facts", order="desc", limit=100, **given)
    return Page(
        "facts.html",
        {
            "title": "Facts",
            "live": "",
            "facts": facts,
            "is_filtered": any(name != "cursor" for name in given),
        },
    )


async def one(reader: Reader, request: Request) -> Page:
    """One fact, whole."""
    fact = await reader.get(path_of("facts", request.path_params["fact"]))
    body = json.dumps(fact["body"], indent=2, ensure_ascii=False)
    return Page("fact.html", {"title": fact["kind"], "fact": fact, "body": body})
