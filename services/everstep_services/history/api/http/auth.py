"""Checks bearer tokens: right ones pass, and addresses with many wrong ones are slowed down.

A guess costs no query of its own: at one moment one query runs, for all tokens that wait.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.clock import Clock
from everstep.store.errors import StoreError
from everstep.store.times import to_us
from everstep.store.tokens import StoredToken, Token, Tokens, id_in, matching
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.settings import ApiSettings

log = logging.getLogger(__name__)

_REMEMBERED = 1000
_ADDRESSES = 10_000
_MINUTE_S = 60.0
_IDS_MOST = 500
_PACE_S = 0.02
_WRITE_EVERY_S = 30.0
"""Between two queries for tokens, however many guesses come."""


@dataclass(eq=False, slots=True)
class _Lookup:
    """One query for the tokens of all requests that wait for it."""

    ids: set[str] = field(default_factory=set)
    tokens: Mapping[str, StoredToken] | None = None
    error: StoreError | None = None


class _Lookups:
    """Reads tokens from the database: one query at a time, and 50 a second at most."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._next = _Lookup()
        self._lock = asyncio.Lock()
        self._ended_at = float("-inf")

    async def find(self, id_: str) -> StoredToken | None:
        """The token with this id."""
        if len(self._next.ids) >= _IDS_MOST:
            self._next = _Lookup()
        lookup = self._next
        lookup.ids.add(id_)
        async with self._lock:
            if lookup.tokens is None and lookup.error is None:
                await self._run(lookup)
        if lookup.error is not None:
            raise lookup.error
        assert lookup.tokens is not None
        return lookup.tokens.get(id_)

    async def _run(self, lookup: _Lookup) -> None:
        """For all that have come until it begins; those that come later need a newer answer."""
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._ended_at + _PACE_S - now()))
        if lookup is self._next:
            self._next = _Lookup()
        try:
            lookup.tokens = await self._tokens.stored(lookup.ids)
        except StoreError as error:
            lookup.error = error
        finally:
            self._ended_at = now()


class TokenAuth:
    """Remembers the tokens that were used a moment ago, and the addresses that sent bad ones."""

    def __init__(self, settings: ApiSettings, tokens: Tokens, clock: Clock) -> None:
        self._settings = settings
        self._tokens = tokens
        self._clock = clock
        self._lookups = _Lookups(tokens)
        self._remembered: OrderedDict[str, tuple[StoredToken, float]] = OrderedDict()
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._used: dict[str, int] = {}
        self._changes = 0
        self._is_behind = False
        self.refused = 0

    async def admit(self, authorization: str | None, address: str) -> Token:
        """The token of a request. A `ProblemError` says why there is none."""
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise _unauthorized("send a token: `Authorization: Bearer evs_…`", "")
        text = text.strip()
        token = matching(text, await self._stored(id_in(text)))
        if token is None:  # a right one passes, whatever else comes from its address
            self._refuse_guessers(address)
            self._count_failure(address)
            raise _unauthorized("this token is not known", "invalid_token")
        self._check(token)
        return token

    async def still_good(self, token: Token) -> bool:
        """Whether a token that was admitted earlier would be admitted now."""
        now = await self._tokens.by_id(token.id)
        return now is not None and now.is_good(to_us(self._clock.wall()))

    def forget(self, token_id: str) -> None:
        """Forget a cached token, after it was changed here."""
        self._changes += 1
        self._remembered.pop(token_id, None)

    async def write_used_for_ever(self) -> None:
        """Write at intervals which tokens were used."""
        while True:
            await self._clock.sleep(_WRITE_EVERY_S)
            await self.write_used()

    async def write_used(self) -> None:
        """Write which tokens were used since the last time; after a failure, try again later."""
        used = dict(self._used)
        try:
            await self._tokens.note_used(used)
        except StoreError as error:  # the times of use must not cause an outage
            if not self._is_behind:
                log.warning("token_uses_not_written tokens=%d error=%s", len(used), error)
            self._is_behind = True
            return
        self._is_behind = False
        for id_, used_us in used.items():
            if self._used.get(id_) == used_us:  # else it was used again meanwhile
                del self._used[id_]

    async def _stored(self, id_: str | None) -> StoredToken | None:
        if id_ is None:
            return None
        stored, read_at = self._remembered.get(id_, (None, 0.0))
        if stored is not None and self._clock.now() - read_at <= self._settings.token_cache_s:
            return stored
        changes = self._changes
        stored = await self._lookups.find(id_)
        if stored is not None and changes == self._changes:  # else it may have been revoked since
            self._remembered[id_] = (stored, self._clock.now())
            self._remembered.move_to_end(id_)
            while len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        return stored

    def _check(self, token: Token) -> None:
        now_us = to_us(self._clock.wall())
        if token.revoked_us is not None:
            raise _unauthorized("this token was revoked", "invalid_token")
        if not token.is_good(now_us):
            raise _unauthorized("this token has expired", "invalid_token")
        self._used[token.id] = now_us

    def _refuse_guessers(self, address: str) -> None:
        began, times = self._failed.get(address, (0.0, 0))
        left_s = began + _MINUTE_S - self._clock.now()
        if left_s > 0 and times >= self._settings.failed_logins_per_minute:
            self.refused += 1
            raise ProblemError(
                429,
                "too_many_bad_tokens",
                f"{times} bad tokens came from this address: wait {left_s:.0f} s",
                headers={"Retry-After": str(int(left_s) + 1)},
            )

    def _count_failure(self, address: str) -> None:
        now = self._clock.now()
        began, times = self._failed.pop(address, (now, 0))
        if now - began >= _MINUTE_S:
            began, times = now, 0
        self._failed[address] = (began, times + 1)
        if times + 1 == self._settings.failed_logins_per_minute:
            log.warning("logins_refused address=%s failed=%d", address, times + 1)
        while len(self._failed) > _ADDRESSES:
            self._failed.popitem(last=False)


def _unauthorized(detail: str, error: str) -> ProblemError:
    challenge = 'Bearer realm="everstep"' + (f', error="{error}"' if error else "")
    return ProblemError(
        401, error or "token_missing", detail, headers={"WWW-Authenticate": challenge}
    )
