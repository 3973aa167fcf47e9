"""Of any number of replicas, the one with the lease reads facts and tells people."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.bus.facts.codec import fact_of
from everstep.bus.input_failures import InputFailures
from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus, FactBatch
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import kind_of
from everstep.messages.documents.notices import Notice
from everstep.observe.printable import printable
from everstep.observe.redaction import redact
from everstep.runtime import Loop
from everstep.subjects import CLUSTER
from everstep_services.history.notifications import payloads
from everstep_services.history.notifications.documents import StoredNotices
from everstep_services.history.notifications.facts import READ, take
from everstep_services.history.notifications.http_client import send
from everstep_services.history.notifications.notices import Delivery, Notices, Rules
from everstep_services.history.notifications.sender import TargetSender
from everstep_services.history.notifications.settings import NotifySettings, Target
from everstep_services.history.notifications.targets import (
    CORRECTED,
    UPDATES_MOST,
    alerts_request,
    ping_request,
)

log = logging.getLogger(__name__)

_LEASE = "notify"
_BATCH = 1000
_FETCH_S = 0.5
_POSITION_EVERY_S = 10.0
_ALIVE_S = 30.0
_LAST_WITHIN_S = 8.0
"""For the last messages of a process whose history service ends with it."""
_CLOSED = frozenset({"pagerduty", "alertmanager"})
"""They keep a test open until somebody closes it."""
_KINDS = frozenset(kind_of(kind) for kind in READ)


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """What a target answered to a test message."""

    target: Target
    is_taken: bool
    text: str


class Notifications:
    """One replica's part in it."""

    def __init__(self, settings: NotifySettings, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._rules = Rules(
            events=frozenset(settings.events),
            updates_most={target: UPDATES_MOST[target] for target in settings.targets},
            settle_s=settings.settle_s,
            cooldown_s=settings.cooldown_s,
            slow_rank_after_s=settings.slow_rank_after_s,
            stale_after_s=settings.stale_after_s,
            corrected=CORRECTED,
        )
        self._senders = {
            target: TargetSender(target, settings, clock) for target in settings.targets
        }
        self._stored = StoredNotices(bus)
        self._notices: Notices | None = None
        self._written: dict[str, str] = {}
        """The states of the notices as they are on the bus: only these are sent."""
        self._lock = asyncio.Lock()
        self._is_last = False
        self._all_is_sent = asyncio.Event()
        self._input_failures = InputFailures("notifications")
        self._offset_s = 0.0
        self._read_at = float("-inf")
        self._cooled = 0
        self._dropped = 0
        self._pings = 0
        self._ping_failures = 0
        self._facts_missed = 0

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops to run: none if there is no target."""
        return (self.work_for_ever,) if self._settings.is_on else ()

    @property
    def is_reading(self) -> bool:
        """It leads, and has read facts a moment ago."""
        is_fresh = self._clock.now() - self._read_at < _ALIVE_S
        return self._notices is not None and is_fresh

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        notices = self._notices
        return {
            "leading": float(notices is not None),
            "open": 0.0 if notices is None else float(len(notices)),
            "cooled_total": float(self._cooled + (notices.cooled if notices else 0)),
            "dropped_total": float(self._dropped + (notices.dropped if notices else 0)),
            "facts_missed_total": float(self._facts_missed),
            "pings_total": float(self._pings),
            "ping_failures_total": float(self._ping_failures),
            "input_failures_total": float(self._input_failures.failures),
        }

    def by_target(self) -> dict[str, dict[str, float]]:
        """What each target was sent so far, and whether it fails."""
        return {
            target: {
                "waiting": float(len(self._waiting(sender))),
                "failing_seconds": round(sender.failing_s(), 3),
                **{name: float(sender.counts[name]) for name in ("sent", "failed", "retries")},
            }
            for target, sender in self._senders.items()
        }

    async def work_for_ever(self) -> None:
        """Whenever the lease is free, take it and send; survive the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._lead)

    async def send_last(
        self, stop: asyncio.Event, report: Callable[[str], None], within_s: float = _LAST_WITHIN_S
    ) -> None:
        """After `stop`, send at once what is held; `report` gets a sentence on what was not sent.

        For a process that no other replica takes over from.
        """
        await stop.wait()
        if not self._senders:
            return
        self._is_last = True
        try:
            async with asyncio.timeout(within_s):
                await self._all_is_sent.wait()
        except TimeoutError:
            report(self._unsent_sentence(within_s))

    def _unsent_sentence(self, within_s: float) -> str:
        if self._notices is None:
            return (
                f"no message about the end of this run was sent within {within_s:g} s: the "
                "lease of another process that sends messages has not run out yet; the next start "
                "on this state directory sends them"
            )
        waiting = [
            f"{count} to {target}" + (f" ({problem})" if (problem := sender.problem) else "")
            for target, sender in self._senders.items()
            if (count := len(self._waiting(sender)))
        ]
        return (
            f"messages were not sent within {within_s:g} s: "
            f"{printable(redact('; '.join(waiting))) or 'facts were still being read'}; the next "
            "start on this state directory sends them"
        )

    async def test(self, targets: Iterable[str] | None = None) -> list[TargetAnswer]:
        """Send a test message to each of these targets, once; to all that are set, by default."""
        names = [name for name in self._senders if targets is None or name in targets]
        return list(await asyncio.gather(*(self._test(self._senders[name]) for name in names)))

    async def _test(self, sender: TargetSender) -> TargetAnswer:
        now = self._clock.wall()
        notice = Notice(
            id=f"test/{new_id()}", event="test", state="firing", job=CLUSTER, began_at=now,
            heard_s=now.timestamp(), reason="This is a test message of Everstep. All is well.",
        )  # fmt: skip
        delivery = Delivery(sender.target, "firing", notice)
        try:
            answer = await sender.attempt(delivery)
            if answer.is_taken:
                sender.note_success()
            if answer.is_taken and sender.target in _CLOSED:
                over = replace(notice, state="resolved")
                await sender.attempt(Delivery(sender.target, "resolved", over))
        except EverstepError as error:
            return TargetAnswer(sender.target, is_taken=False, text=printable(redact(str(error))))
        quoted = f': "{answer.text}"' if answer.text else ""
        text = f"status {answer.status}{quoted}"
        return TargetAnswer(sender.target, is_taken=answer.is_taken, text=text)

    # --- leading ---

    async def _lead(self, term: Term) -> None:
        try:
            await self._work(term)
        except* (EverstepError, TimeoutError) as group:
            raise group.exceptions[0] from None
        finally:
            if self._notices is not None:
                self._cooled += self._notices.cooled
                self._dropped += self._notices.dropped
            self._notices, self._written, self._read_at = None, {}, float("-inf")

    async def _work(self, term: Term) -> None:
        # Seconds since 1970 that do not jump with the time of day, for as long as we lead.
        self._offset_s = self._clock.wall().timestamp() - self._clock.now()
        notices = self._notices = await self._stored.load(self._rules, self._now())
        self._note_written(notices.all())
        for sender in self._senders.values():
            since_s = notices.failing_since(sender.target)
            sender.failing_since = None if since_s is None else since_s - self._offset_s
        async with asyncio.TaskGroup() as tasks:
            for sender in self._senders.values():
                tasks.create_task(self._send(sender), name=f"send-{sender.target}")
            if self._settings.dead_man.url_file is not None:
                tasks.create_task(self._ping_for_ever(), name="dead-man")
            if "alertmanager" in self._senders:
                tasks.create_task(self._refresh_for_ever(notices), name="refresh-alerts")
            await self._read_on(term, notices)

    async def _read_on(self, term: Term, notices: Notices) -> None:
        written_at, written = self._clock.now(), self._stored.position
        async with self._bus.facts(written) as reader:
            while True:
                is_last = self._is_last
                batch = await reader.fetch(_BATCH, _FETCH_S)
                self._take(batch, notices)
                has_read_all = len(batch.facts) < _BATCH
                if has_read_all:  # what ends a notice may be among the next ones
                    if is_last:
                        notices.stop_settling()
                    notices.advance(self._now())
                self._note_failing(notices)
                now = self._clock.now()
                has_moved = self._stored.position != written
                if notices.is_changed or (has_moved and now - written_at >= _POSITION_EVERY_S):
                    await self._write(notices)
                    written_at, written = now, self._stored.position
                self._read_at = now
                if is_last and has_read_all and not any(map(self._waiting, self._senders.values())):
                    self._all_is_sent.set()
                await term.renew()

    def _note_failing(self, notices: Notices) -> None:
        """A moment without the lease, or another replica, must not hide how long a target fails."""
        for sender in self._senders.values():
            since = sender.failing_since
            since_s = None if since is None else since + self._offset_s
            notices.note_failing(sender.target, since_s)

    def _take(self, batch: FactBatch, notices: Notices) -> None:
        self._facts_missed += batch.missed
        for message in batch.facts:
            fact = fact_of(message, _KINDS)
            if fact is not None:
                with self._input_failures.caught(kind_of(fact)):
                    take(notices, fact, self._now())
        self._stored.position = batch.position

    async def _write(self, notices: Notices) -> None:
        """Write what is open; then it may be sent."""
        async with self._lock:
            self._note_written(await self._stored.write(notices))
        for sender in self._senders.values():
            sender.wake()

    def _note_written(self, notices: Iterable[Notice]) -> None:
        self._written = {notice.id: notice.state for notice in notices}

    def _now(self) -> float:
        return self._clock.now() + self._offset_s

    # --- sending ---

    async def _send(self, sender: TargetSender) -> None:
        async def ended(delivery: Delivery, is_taken: bool) -> None:
            notices = self._notices
            if notices is None:
                return
            if is_taken:
                notices.delivered(delivery)
            else:
                notices.given_up(delivery)
            await self._write(notices)

        await sender.send_for_ever(lambda: self._waiting(sender), ended)

    def _waiting(self, sender: TargetSender) -> list[Delivery]:
        """The messages to send, written on the bus first, so that replicas do not differ."""
        if self._notices is None:
            return []
        deliveries = self._notices.deliveries(sender.target)
        return [
            delivery
            for delivery in deliveries
            if self._written.get(delivery.notice.id) == delivery.notice.state
        ]

    async def _refresh_for_ever(self, notices: Notices) -> None:
        """Send alerts again that last: Alertmanager lets them go after an hour."""
        while True:
            await self._clock.sleep(self._settings.alertmanager.refresh_s)
            told = [notice for notice in notices.all() if _is_firing(notice)]
            if not told:
                continue
            now, url = self._clock.wall(), self._settings.dashboard_url
            alerts: list[dict[str, object]] = [
                payloads.alertmanager(notice, url, now) for notice in told
            ]
            try:
                request = await asyncio.to_thread(alerts_request, alerts, self._settings, {})
                answer = await send(request, self._settings.within_s)
            except EverstepError as error:
                log.warning("alerts_not_refreshed error=%s", error)
            else:
                if not answer.is_taken:
                    log.warning("alerts_not_refreshed status=%d", answer.status)

    async def _ping_for_ever(self) -> None:
        """Tell the dead-man service that messages would be sent, while that is true."""
        while True:
            is_able = self._bus.connected and self.is_reading
            if is_able:
                await self._ping()
            await self._clock.sleep(self._settings.dead_man.every_s if is_able else 1.0)

    async def _ping(self) -> None:
        try:
            request = await asyncio.to_thread(ping_request, self._settings)
            answer = await send(request, self._settings.within_s)
        except EverstepError as error:
            self._ping_failures += 1
            log.warning("dead_man_not_pinged error=%s", error)
            return
        self._pings += answer.is_taken
        if not answer.is_taken:
            self._ping_failures += 1
            log.warning("dead_man_not_pinged status=%d", answer.status)


def _is_firing(notice: Notice) -> bool:
    """Alertmanager has it, and it lasts."""
    has_it = any(
        target.target == "alertmanager" and target.state == "firing" for target in notice.targets
    )
    return has_it and notice.state == "firing"
