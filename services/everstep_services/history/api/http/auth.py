"""Checks bearer tokens: valid ones are cached, and addresses with many bad ones are refused."""

import logging
from collections import OrderedDict
from hashlib import sha256

from everstep.clock import Clock
from everstep.store.errors import StoreError
from everstep.store.times import to_us
from everstep.store.tokens import Token, Tokens
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.settings import ApiSettings

log = logging.getLogger(__name__)

_REMEMBERED = 1000
_ADDRESSES = 10_000
_MINUTE_S = 60.0


class TokenAuth:
    """Remembers the tokens that were valid a moment ago, and the addresses that sent bad ones."""

    def __init__(self, settings: ApiSettings, tokens: Tokens, clock: Clock) -> None:
        self._settings = settings
        self._tokens = tokens
        self._clock = clock
        self._good: OrderedDict[bytes, tuple[Token, float]] = OrderedDict()
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
        fingerprint = sha256(text.encode()).digest()
        token = self._remembered(fingerprint)
        if token is None:
            # A token that was good is not a guess, whatever else its address sends.
            if fingerprint not in self._good:
                self._refuse_guessers(address)
            changes = self._changes
            token = await self._tokens.find(text.strip())
            if token is None:
                self._count_failure(address)
                raise _unauthorized("this token is not known", "invalid_token")
            if changes == self._changes:  # else it may have been revoked since it was read
                self._remember(fingerprint, token)
        self._check(token)
        return token

    async def still_good(self, token: Token) -> bool:
        """Whether a token that was admitted earlier would be admitted now."""
        now = await self._tokens.by_id(token.id)
        return now is not None and now.is_good(to_us(self._clock.wall()))

    def forget(self, token_id: str) -> None:
        """Forget a cached token, after it was changed here."""
        self._changes += 1
        kept = [(k, v) for k, v in self._good.items() if v[0].id != token_id]
        self._good = OrderedDict(kept)

    async def write_used_for_ever(self, every_s: float = 30.0) -> None:
        """Write at intervals which tokens were used."""
        while True:
            await self._clock.sleep(every_s)
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

    def _remember(self, fingerprint: bytes, token: Token) -> None:
        self._good[fingerprint] = (token, self._clock.now())
        while len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def _remembered(self, fingerprint: bytes) -> Token | None:
        remembered = self._good.get(fingerprint)
        if remembered is None or self._clock.now() - remembered[1] > self._settings.token_cache_s:
            return None
        return remembered[0]

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
