"""Where the tools get their answers: REST, with the caller's token, or the record on disk."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everstep_services.cli.api.client import Api, Params, is_sendable
from everstep_services.cli.api.location import find_api, find_record
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.mcp_server.answers import ToolAnswer, fits

PAGE_MOST = 200
_AWAY = (
    "no API is known to this MCP server: start one with `everstep up`, or start the MCP server "
    "with --api URL"
)


@dataclass(frozen=True, slots=True)
class OpenSource:
    """One connection to it, for one call of a tool."""

    api: Api
    notes: tuple[str, ...] = ()
    """What the reader has to know about all of its answers."""

    def get(self, title: str, path: str, params: Params | None = None) -> ToolAnswer:
        """One resource."""
        return ToolAnswer(title, self.api.get(path, params), self.notes)

    def page(self, title: str, path: str, params: Params, limit: int) -> ToolAnswer:
        """A page of a list; fewer items where `limit` of them would be too large."""
        asked = limit
        while True:
            page = self.api.get(path, {**params, "limit": limit})
            if limit <= 1 or fits(page):
                break
            limit = max(1, min(limit, len(page["items"])) // 2)
        notes = [*self.notes, *_page_notes(page, limit, asked)]
        return ToolAnswer(f"{title}: {len(page['items'])} items.", page, notes)


def _page_notes(page: Mapping[str, Any], limit: int, asked: int) -> Iterator[str]:
    if limit < asked:
        yield f"Only {limit} of {asked} items were asked for, or the answer would be too large."
    if page.get("next"):
        yield "There are more: call again with `next` as `cursor`, and the same filters."


class Source:
    """Opens connections. `token_of` gives the token of the caller; None for the server's own."""

    def __init__(
        self, invocation: Invocation, token_of: Callable[[], str | None] | None = None
    ) -> None:
        self._invocation = invocation
        self._token_of = token_of

    @property
    def is_own(self) -> bool:
        """The caller is the user who started the server: files of this user may be shown."""
        return self._token_of is None

    @property
    def invocation(self) -> Invocation:
        """The options of the server."""
        return self._invocation

    @contextmanager
    def open(self) -> Iterator[OpenSource]:
        """A connection for one call; a `CliError` says why there is none."""
        if self._token_of is None:
            api, notes = find_record(self._invocation)
            with api:
                yield OpenSource(api, tuple(f"{note}." for note in notes))
            return
        token = self._token_of()
        if token is None:  # the access check has let nobody pass without one
            raise CliError("send an Everstep token: `Authorization: Bearer evs_…`", Exit.FORBIDDEN)
        with open_with(self._invocation, token) as api:
            yield OpenSource(api)

    def get(self, title: str, path: str, params: Params | None = None) -> ToolAnswer:
        """One resource, by a connection of its own."""
        with self.open() as source:
            return source.get(title, path, params)

    def page(self, title: str, path: str, params: Params, limit: int) -> ToolAnswer:
        """A page of a list, likewise."""
        with self.open() as source:
            return source.page(title, path, params, limit)


def open_with(invocation: Invocation, token: str) -> Api:
    """A client for the API that uses this token, and no token of the server."""
    if not is_sendable(token):
        raise CliError("this is not a token", Exit.FORBIDDEN)
    place = find_api(invocation, waits=False)
    if place is None:
        raise CliError(_AWAY, Exit.UNREACHABLE)
    return place.open_as(token, "send a valid token: `Authorization: Bearer evs_…`")
