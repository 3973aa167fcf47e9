"""The output of ranks, live: server-sent events with the lines that the log store has got."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import msgspec

from everstep.backoff import Backoff
from everstep.store.tokens import Token
from everstep_services.history.api.context import Context
from everstep_services.history.api.http.live_stream import EventStream
from everstep_services.history.api.http.problems import ProblemError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 2.0
_AWAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Lines:
    """A page of lines, and where the next page begins."""

    round: int
    next: str
    data: bytes
    """The page as JSON; empty when it has no lines."""
    is_end: bool


class LogStream(EventStream):
    """Sends a page of lines, and then each later page that has lines."""

    def __init__(
        self,
        context: Context,
        token: Token,
        first: Lines,
        after: Callable[[str], Awaitable[Lines]],
        next_round: Callable[[int], Awaitable[Lines | None]],
    ) -> None:
        super().__init__(context, token)
        self._first = first
        self._after = after
        self._next_round = next_round

    async def _chunks(self) -> AsyncIterator[bytes]:
        clock, keep_alive_s = self._context.clock, self._context.settings.keep_alive_s
        page, waits, checked = self._first, Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S), clock.now()
        yield b"retry: 2000\nid: %b\n: welcome\n\n" % page.next.encode()
        while not self._context.feed.notifier.is_closed:
            if page.data:
                yield b"event: lines\nid: %b\ndata: %b\n\n" % (page.next.encode(), page.data)
                waits.reset()
            if page.is_end:
                await clock.sleep(waits.failed())
            if clock.now() - checked >= keep_alive_s:
                if not await self._is_still_welcome():
                    return
                checked = clock.now()
                yield b"id: %b\n: alive\n\n" % page.next.encode()
            try:
                page = await self._following(page)
            except ProblemError as problem:
                if problem.status_code != 503:
                    yield b"event: problem\ndata: %b\n\n" % _detail(problem)
                    return
                page = Lines(page.round, page.next, b"", is_end=True)
                await clock.sleep(_AWAY_S)

    async def _following(self, page: Lines) -> Lines:
        """The next page; the first of the next round where this one has no more lines."""
        is_over = page.is_end and not page.data
        if is_over and (begun := await self._next_round(page.round)) is not None:
            return begun
        return await self._after(page.next)


def _detail(problem: ProblemError) -> bytes:
    return msgspec.json.encode({"detail": problem.detail, "code": problem.code})
