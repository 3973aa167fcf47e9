"""Who has sent a message: its signature, its age, and how many the sender sends."""

import asyncio
import hmac
import re
from collections import deque
from collections.abc import Mapping

from everstep.clock import Clock
from everstep.ids import BadNameError, checked_name
from everstep.settings import SettingsError, read_secret
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.notifications.targets import (
    SIGNATURE,
    TIMESTAMP,
    signed_headers,
)
from everstep_services.history.webhooks.settings import WebhooksSettings

KEY_LEAST_BYTES = 16
_TIMESTAMP = re.compile(r"\d{1,12}", re.ASCII)
_SENDERS_MOST = 1000


class Senders:
    """Checks messages against the keys in a folder; a new key needs no restart."""

    def __init__(self, settings: WebhooksSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._recent: dict[str, deque[float]] = {}

    async def check(self, sender: str, headers: Mapping[str, str], body: bytes) -> int:
        """When the message was signed, in seconds since 1970. A `ProblemError` refuses it."""
        self._count(sender)
        key = await asyncio.to_thread(self._key, sender)
        timestamp, signature = headers.get(TIMESTAMP, ""), headers.get(SIGNATURE, "")
        if timestamp and not _TIMESTAMP.fullmatch(timestamp):
            detail = f"{TIMESTAMP} must be whole seconds since 1970, got {timestamp[:40]!r}"
            raise ProblemError(403, "signature_wrong", detail)
        if not timestamp or not signature:
            detail = f"sign the message: {TIMESTAMP}: seconds since 1970, {SIGNATURE}: sha256=…"
            raise ProblemError(403, "signature_missing", detail)
        expected = signed_headers(key, body, int(timestamp))[SIGNATURE]
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            detail = (
                f"the signature is not HMAC-SHA256 of `{TIMESTAMP}.BODY` with the key of {sender}"
            )
            raise ProblemError(403, "signature_wrong", detail)
        now = self._clock.wall().timestamp()
        age_s, most_s = now - int(timestamp), self._settings.replay_window_s
        if abs(age_s) > most_s:
            when = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s in the future"
            detail = (
                f"it was signed {when} by our clock, and {most_s:g} s is the limit: sign it again"
            )
            raise ProblemError(403, "signature_old", detail)
        return int(timestamp)

    def _count(self, sender: str) -> None:
        now, most = self._clock.now(), self._settings.per_minute
        if sender not in self._recent and len(self._recent) >= _SENDERS_MOST:
            self._recent.clear()
        recent = self._recent.setdefault(sender, deque())
        while recent and now - recent[0] >= 60:
            recent.popleft()
        if len(recent) >= most:
            wait_s = int(60 - (now - recent[0])) + 1
            raise ProblemError(
                429, "too_many_messages", f"more than {most} messages a minute: wait {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )  # fmt: skip
        recent.append(now)

    def _key(self, sender: str) -> str:
        folder = self._settings.keys_dir
        if folder is None:
            detail = "no webhooks are taken here: set keys_dir in [api.webhooks]"
            raise ProblemError(403, "webhooks_off", detail)
        try:
            path = folder / f"{checked_name('sender', sender)}.key"
        except BadNameError as error:
            detail = f"the token's name names the sender: {error}"
            raise ProblemError(403, "no_key", detail) from error
        try:
            key = read_secret(path)
        except SettingsError as error:
            detail = f"there is no usable key for {sender}: write one to {sender}.key in keys_dir"
            raise ProblemError(403, "no_key", detail) from error
        if len(key.encode()) < KEY_LEAST_BYTES:
            detail = (
                f"the key of {sender} has fewer than {KEY_LEAST_BYTES} bytes: make a longer one"
            )
            raise ProblemError(403, "no_key", detail)
        return key
