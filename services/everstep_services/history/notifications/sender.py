"""Sends the messages of one target, one after the other, again and again while it fails."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everstep.backoff import Backoff, jittered_s
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep_services.history.notifications.http_client import HttpAnswer, send
from everstep_services.history.notifications.notices import Delivery
from everstep_services.history.notifications.settings import NotifySettings, Target
from everstep_services.history.notifications.targets import request_for

log = logging.getLogger(__name__)

_WAIT_MOST_S = 3600.0
"""A target that asks for more patience is asked again after this."""


class Ended(Protocol):
    """Hears of a message that was taken, or given up."""

    async def __call__(self, delivery: Delivery, *, is_taken: bool) -> None: ...


@dataclass(slots=True)
class _Tries:
    """The attempts at one message. Times are of our own clock."""

    since: float
    last: float


class TargetSender:
    """One target's. A message that fails lets others pass before it is tried again."""

    def __init__(self, target: Target, settings: NotifySettings, clock: Clock) -> None:
        self.target = target
        self._settings = settings
        self._clock = clock
        self._backoff = Backoff(settings.retry_first_s, settings.retry_most_s)
        self._tries: dict[str, _Tries] = {}
        self._wake = asyncio.Event()
        self.failing_since: float | None = None
        """Since when every attempt has failed, by our clock; None on a replica on standby."""
        self.problem = ""
        """The reason why the newest attempt failed; empty after a success."""
        self.counts: Counter[str] = Counter()

    def failing_s(self) -> float:
        """How long every attempt has failed; 0 after a success, and on a replica on standby."""
        since = self.failing_since
        return 0.0 if since is None else max(0.0, self._clock.now() - since)

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    async def send_for_ever(self, waiting: Callable[[], list[Delivery]], ended: Ended) -> None:
        """Send what waits; `ended` hears of each message that was taken, or given up."""
        self._backoff.reset()
        try:
            await self._send_on(waiting, ended)
        finally:
            self.failing_since = None  # another replica sends from now on

    async def _send_on(self, waiting: Callable[[], list[Delivery]], ended: Ended) -> None:
        while True:
            self._wake.clear()
            deliveries = waiting()
            keys = {delivery.key for delivery in deliveries}
            self._tries = {key: tries for key, tries in self._tries.items() if key in keys}
            if not deliveries:
                await self._wake.wait()
                continue
            delivery = min(deliveries, key=lambda waiting: self._last(waiting.key))
            wait_s = await self._attempt(delivery, ended)
            if wait_s > 0:
                await self._clock.sleep(wait_s)

    async def attempt(self, delivery: Delivery) -> HttpAnswer:
        """Send one message once. An `EverstepError` when that is not possible."""
        now = self._clock.wall()
        request = await asyncio.to_thread(request_for, delivery, self._settings, now)
        return await send(request, self._settings.within_s)

    def _last(self, key: str) -> float:
        tries = self._tries.get(key)
        return float("-inf") if tries is None else tries.last

    async def _attempt(self, delivery: Delivery, ended: Ended) -> float:
        """How long to wait before the next attempt at anything."""
        try:
            answer = await self.attempt(delivery)
        except EverstepError as error:
            return await self._failed(delivery, str(error), None, ended)
        if answer.is_taken:
            self._backoff.reset()
            self.note_success()
            self.counts["sent"] += 1
            log.info("notice_sent target=%s key=%s", self.target, delivery.key)
            await ended(delivery, is_taken=True)
            return 0.0
        problem = f"status {answer.status}: {answer.text}"
        if answer.is_final:
            self._note_failure(problem)
            await self._give_up(delivery, problem, ended)
            return 0.0
        wait_s = answer.wait_s(self._clock.wall())
        return await self._failed(delivery, problem, wait_s, ended)

    async def _failed(
        self, delivery: Delivery, problem: str, asked_s: float | None, ended: Ended
    ) -> float:
        self._note_failure(problem)
        now = self._clock.now()
        tries = self._tries.setdefault(delivery.key, _Tries(since=now, last=now))
        tries.last = now
        self.counts["retries"] += 1
        if now - tries.since >= self._settings.retry_for_s:
            await self._give_up(delivery, problem, ended)
        wait_s = jittered_s(self._backoff.failed())
        if self._backoff.failures == 1:
            log.warning(
                "notice_waits target=%s key=%s error=%s", self.target, delivery.key, problem
            )
        return wait_s if asked_s is None else min(max(asked_s, 0.1), _WAIT_MOST_S)

    def note_success(self) -> None:
        """The target takes messages: what failed before is over."""
        self.failing_since = None
        self.problem = ""

    def _note_failure(self, problem: str) -> None:
        self.problem = problem
        if self.failing_since is None:
            self.failing_since = self._clock.now()

    async def _give_up(self, delivery: Delivery, problem: str, ended: Ended) -> None:
        self.counts["failed"] += 1
        log.error("notice_given_up target=%s key=%s error=%s", self.target, delivery.key, problem)
        await ended(delivery, is_taken=False)
