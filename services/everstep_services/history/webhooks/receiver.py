"""Keeps what senders announce, and acts when it is due: drains and exclusions of nodes.

`Senders` checks who has sent a message: its signature, its age, and how many the sender sends.
"""

import asyncio
import hmac
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from everstep.bus.errors import BusDeniedError, BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.ids import BadNameError, checked_name
from everstep.messages import ControlDocument
from everstep.messages.codec import BadMessageError, decode_as
from everstep.settings import SettingsError, read_secret
from everstep.store.database import Database
from everstep.store.errors import StoreError
from everstep.store.maintenance import (
    MaintenanceNotice,
    MaintenanceNotices,
    MaintenanceState,
    NoticeChange,
)
from everstep.store.times import from_us, to_us
from everstep.subjects import CLUSTER
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.node_names import jobs_of_node, unknown_nodes_text
from everstep_services.history.notifications.targets import SIGNATURE, TIMESTAMP, signed_headers
from everstep_services.history.operator_requests import (
    NoSuchJobError,
    OperatorRequest,
    RequestRefusedError,
    ServiceUnavailableError,
    carry_out,
)
from everstep_services.history.webhooks.settings import WebhooksSettings
from everstep_services.history.webhooks.shapes import Announcement, Reading

log = logging.getLogger(__name__)


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


_EVERY_S = 1.0
_AGAIN_US = 15_000_000
"""After a failure, or the death of the replica that acted, a notice is due again."""
_ATTEMPTS_MOST = 240
_AT_ONCE = 50
_FORGET_EVERY = 3600


@dataclass(frozen=True, slots=True)
class Received:
    """What became of a message."""

    changes: tuple[NoticeChange, ...]
    ignored: tuple[str, ...]


class MaintenanceReceiver:
    """The notices of all senders."""

    def __init__(
        self, settings: WebhooksSettings, database: Database, bus: Bus, clock: Clock
    ) -> None:
        self.senders = Senders(settings, clock)
        self.notices = MaintenanceNotices(database)
        self._settings = settings
        self._database = database
        self._bus = bus
        self._clock = clock
        self._aliases = dict(alias.partition("=")[::2] for alias in settings.aliases)
        self._failures = InputFailures("webhooks")

    # --- messages ---

    async def receive(self, sender: str, sent_s: int, reading: Reading, lead_s: float) -> Received:
        """Keep what a sender announces. A `ProblemError` refuses all of it."""
        announced = [item for item in reading.announcements if not item.is_cancelled]
        nodes = await self._nodes({name for item in announced for name in item.nodes})
        await self._check_room(sender, sum(len(item.nodes) for item in announced))
        changes: list[NoticeChange] = []
        ignored = list(reading.ignored)
        for item in reading.announcements:
            if item.is_cancelled:
                cancelled = await self._cancel(sender, item.id)
                changes += cancelled
                if not cancelled:
                    text = f"{item.id}: nothing is announced; what arrives later is cancelled"
                    ignored.append(text)
            else:
                made = [
                    self._notice(sender, sent_s, item, nodes[name], lead_s) for name in item.nodes
                ]
                changes += await self.notices.put({notice.node: notice for notice in made}.values())
        log.info(
            "webhook_taken sender=%s notices=%d ignored=%d", sender, len(changes),
            len(ignored),
        )  # fmt: skip
        return Received(tuple(changes), tuple(ignored))

    async def _cancel(self, sender: str, id_: str) -> list[NoticeChange]:
        notices, cancelled = await self.notices.cancel(
            sender, id_, at_us=to_us(self._clock.wall()), outcome=f"cancelled by {sender}"
        )
        return [NoticeChange(notice, is_stale=not cancelled) for notice in notices]

    def _notice(
        self, sender: str, sent_s: int, announced: Announcement, node: str, lead_s: float
    ) -> MaintenanceNotice:
        now_us, sent_us = to_us(self._clock.wall()), sent_s * 1_000_000
        # "At once" is when it was signed: a second copy of the message is the same notice.
        starts_at = announced.starts_at
        starts_us = min(sent_us, now_us) if starts_at is None else to_us(starts_at)
        return MaintenanceNotice(
            sender=sender,
            id=announced.id,
            node=node,
            action=announced.action,
            starts_us=starts_us,
            ends_us=None if announced.ends_at is None else to_us(announced.ends_at),
            reason=announced.reason,
            sent_us=sent_us,
            received_us=now_us,
            next_us=max(starts_us - int(lead_s * 1e6), now_us),
        )

    async def _nodes(self, names: set[str]) -> dict[str, str]:
        """The id of each node. One unknown name refuses the message."""
        problem = await unknown_nodes_text(self._database, sorted(names), self._aliases)
        if problem is not None:
            raise ProblemError(422, "unknown_node", problem)
        return {name: self._aliases.get(name, name) for name in names}

    async def _check_room(self, sender: str, new: int) -> None:
        most = self._settings.waiting_most
        if new and await self.notices.waiting(sender) + new > most:
            detail = f"notices for {most} nodes wait, the limit of {sender}: cancel some of them"
            raise ProblemError(409, "too_many_notices", detail)

    # --- time ---

    async def act_for_ever(self, *, is_mine: Callable[[], bool]) -> None:
        """Act on what is due, in the replica that writes the record."""
        turns = 0
        while True:
            await self._clock.sleep(_EVERY_S)
            if not is_mine():
                continue
            try:
                await self.act()
                turns += 1
                if turns % _FORGET_EVERY == 0:
                    await self.notices.forget_old(to_us(self._clock.wall()))
            except StoreError as error:
                log.warning("maintenance_waits error=%s", error)

    async def act(self) -> int:
        """Act on all that is due now; how many notices that were."""
        now_us = to_us(self._clock.wall())
        due = await self.notices.take_due(now_us, now_us + _AGAIN_US, _AT_ONCE)
        for notice in due:
            with self._failures.caught("maintenance"):
                await self._act_on(notice)
        return len(due)

    async def _act_on(self, notice: MaintenanceNotice) -> None:
        state, outcome = await self._outcome(notice)
        if state == "waiting" and notice.attempts >= _ATTEMPTS_MOST:
            state = "failed"
        await self.notices.end(notice, state, outcome)
        write = log.warning if state in {"waiting", "failed", "refused"} else log.info
        write(
            "maintenance sender=%s id=%r node=%s action=%s state=%s outcome=%r", notice.sender,
            notice.id, notice.node, notice.action, state, outcome,
        )  # fmt: skip

    async def _outcome(self, notice: MaintenanceNotice) -> tuple[MaintenanceState, str]:
        now = self._clock.wall()
        if notice.ends_us is not None and from_us(notice.ends_us) <= now:
            return "failed", "its end had passed before anything could be done"
        try:
            why_not = await self._why_not(notice)
            jobs = (
                await jobs_of_node(self._database, notice.node) if notice.action == "drain" else []
            )
            if why_not:
                about = f" of {', '.join(jobs)}" if jobs else ""
                return "observed", f"would {notice.action} {notice.node}{about}: {why_not}"
            return "done", await self._carry_out(notice, jobs, now)
        except RequestRefusedError as error:
            return "refused", str(error)
        except (ServiceUnavailableError, BusDeniedError, BusError) as error:
            return "waiting", f"tried again soon: {error}"

    async def _carry_out(self, notice: MaintenanceNotice, jobs: list[str], now: datetime) -> str:
        texts: list[str] = []
        if notice.action == "exclude" or notice.ends_us is not None:
            ends = notice.ends_us
            ttl_s = None if ends is None else (from_us(ends) - now).total_seconds()
            texts.append(await self._ask(notice, "exclude", CLUSTER, {"ttl_s": ttl_s}))
        for job in jobs:
            details = {"within_s": self._settings.save_within_s}
            try:
                texts.append(await self._ask(notice, "drain", job, details))
            except NoSuchJobError:
                continue  # it has ended meanwhile
        if notice.action == "drain" and not jobs:
            texts.append("it takes part in no job")
        return "; ".join(texts)

    async def _ask(
        self, notice: MaintenanceNotice, verb: str, job: str, details: Mapping[str, float | None]
    ) -> str:
        request = OperatorRequest(
            "exclude" if verb == "exclude" else "drain",
            job,
            f"{notice.sender} (webhook)",
            f"{notice.reason} ({notice.id})",
            "rest",
            {**details, "node": notice.node},
        )
        return await carry_out(self._bus, request)

    async def _why_not(self, notice: MaintenanceNotice) -> str:
        if notice.sender not in self._settings.enforce:
            return f"{notice.sender} is not in `enforce` of [api.webhooks]"
        document = await self._bus.documents("CONTROL").get(CLUSTER)
        try:
            control = None if document.data is None else decode_as(document.data, ControlDocument)
        except BadMessageError:
            return "the switches cannot be read"
        return "the brake is on" if control is not None and control.is_braked else ""
