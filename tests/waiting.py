"""The one place where a test waits for something that nobody tells it."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]
WITHIN_S = 60.0
LOOK_EVERY_S = 0.02
LOOK_MOST_S = 0.5
LOOK_SHARE = 0.1
"""Of the time of a wait: looks at a service must not keep it, and all others, from their work."""


def until(
    look: Callable[[], T | None],
    what: str,
    *,
    holds: Callable[[T], object] = bool,
    despite: Errors = (),
    within_s: float = WITHIN_S,
) -> T:
    """Look again and again; the first thing seen that holds.

    `None` and the errors in `despite` mean that there is nothing to see yet.
    """
    seen: object = None
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        try:
            found = look()
        except despite as error:
            seen = error
        else:
            if found is not None and holds(found):
                return found
            seen = found
        assert time.monotonic() < deadline, _not_seen(what, within_s, seen)
        time.sleep(_pause_s(began))


@overload
async def until_async(
    look: Callable[[], Awaitable[T | None]],
    what: str,
    *,
    holds: Callable[[T], object] = bool,
    despite: Errors = (),
    within_s: float = WITHIN_S,
) -> T: ...


@overload
async def until_async(
    look: Callable[[], T | None],
    what: str,
    *,
    holds: Callable[[T], object] = bool,
    despite: Errors = (),
    within_s: float = WITHIN_S,
) -> T: ...


async def until_async(
    look: Callable[[], object],
    what: str,
    *,
    holds: Callable[..., object] = bool,
    despite: Errors = (),
    within_s: float = WITHIN_S,
) -> object:
    """Like `until`, while the loop goes on; `look` may be async, and is cut off when time is up."""
    seen: object = None
    limit = asyncio.timeout(within_s)
    try:
        async with limit:
            while True:
                began = time.monotonic()
                try:
                    found = look()
                    if inspect.isawaitable(found):
                        found = await found
                except despite as error:
                    seen = error
                else:
                    if found is not None and holds(found):
                        return found
                    seen = found
                await asyncio.sleep(_pause_s(began))
    except TimeoutError:
        if not limit.expired():
            raise
    raise AssertionError(_not_seen(what, within_s, seen))


async def turns(count: int = 1) -> None:
    """Let every other task have `count` turns: where a test is about their order."""
    for _ in range(count):
        await asyncio.sleep(0)


def _pause_s(began: float) -> float:
    """Until the next look, after one that began then."""
    return min(LOOK_MOST_S, max(LOOK_EVERY_S, (time.monotonic() - began) / LOOK_SHARE))


def _not_seen(what: str, within_s: float, seen: object) -> str:
    return f"not within {within_s:g} s: {what}; last seen: {seen!r}"
