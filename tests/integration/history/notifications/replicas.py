"""Replicas that send notices, and what reaches the targets from them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.bus import leader_election
from everstep.bus.client import NatsBus
from everstep.clock import Clock, SystemClock
from everstep.messages import Fact, NoticesDocument
from everstep.messages.codec import decode_as
from everstep.messages.documents.notices import Notice
from everstep.subjects import CLUSTER
from everstep_services.history.notifications import http_client
from everstep_services.history.notifications.documents import BUCKET
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import (
    AlertmanagerSettings,
    NotifySettings,
    PagerDutySettings,
    SlackSettings,
    WebhookSettings,
)
from tests.integration.history.notifications.targets import TargetServer
from tests.waiting import until_async

SLACK_SECRET = "T0000/B0000/slackSecretXyz"
ROUTING_KEY = "R0UT1NGKEYR0UT1NGKEYR0UT1NGKEY00"
WEBHOOK_SECRET = "webhook-secret-1234567890"
_EXCHANGE = http_client._Exchange


def secret(path: Path, text: str) -> Path:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def quick(**more: Any) -> NotifySettings:
    return replace(
        NotifySettings(
            settle_s=0.0, retry_first_s=0.05, retry_most_s=0.2, within_s=5.0,
            dashboard_url="https://everstep.example",
        ),
        **more,
    )  # fmt: skip


def webhook_only(server: TargetServer, **more: Any) -> NotifySettings:
    return quick(webhook=WebhookSettings(url=f"{server.url}/hook"), **more)


def all_targets(server: TargetServer, folder: Path, **more: Any) -> NotifySettings:
    return quick(
        webhook=WebhookSettings(
            url=f"{server.url}/hook", secret_file=secret(folder / "hmac", WEBHOOK_SECRET)
        ),
        slack=SlackSettings(
            url_file=secret(folder / "slack", f"{server.url}/services/{SLACK_SECRET}")
        ),
        pagerduty=PagerDutySettings(
            routing_key_file=secret(folder / "pd", ROUTING_KEY), url=f"{server.url}/v2/enqueue"
        ),
        alertmanager=AlertmanagerSettings(url=server.url),
        **more,
    )


class AttemptsByHand:
    """Attempts whose time is over when a test says so, and not before.

    A machine that stands still for a while then causes no further attempt: the test can know how
    many there are. The lease outlasts the test for the same reason.
    """

    WITHIN_S = 20.0
    """The most that settings admit: it still limits each wait of the socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._limits: list[asyncio.Timeout] = []
        self._exchanges: list[http_client._Exchange] = []
        by_hand = SimpleNamespace(timeout=self._timeout, to_thread=asyncio.to_thread)
        monkeypatch.setattr(http_client, "asyncio", by_hand)
        monkeypatch.setattr(http_client, "_Exchange", self._exchange)
        monkeypatch.setattr(leader_election, "_LEASE_S", 600)

    def run_out(self) -> None:
        """The time of the newest attempt is over."""
        self._limits[-1].reschedule(asyncio.get_running_loop().time())

    def has_status(self) -> bool:
        """The newest attempt has the status of its answer, and waits for the text."""
        return bool(self._exchanges) and self._exchanges[-1].begun is not None

    def _timeout(self, _within_s: float) -> asyncio.Timeout:
        self._limits.append(asyncio.timeout(None))
        return self._limits[-1]

    def _exchange(self, request: http_client.HttpRequest, within_s: float) -> http_client._Exchange:
        self._exchanges.append(_EXCHANGE(request, within_s))
        return self._exchanges[-1]


@asynccontextmanager
async def at_work(
    settings: NotifySettings, bus: NatsBus, clock: Clock | None = None
) -> AsyncIterator[Notifications]:
    made = Notifications(settings, bus, clock or SystemClock())
    task = asyncio.create_task(made.work_for_ever())
    try:
        await leading(made)
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def leading(made: Notifications) -> None:
    """It has written from when on it sends."""
    await until_async(lambda: made.statistics()["leading"] == 1, "a replica that leads")
    await until_async(lambda: made.is_reading, "a replica that reads")


async def record(bus: NatsBus, *facts: Fact) -> None:
    now = datetime.now(UTC)
    await asyncio.gather(*(bus.record(replace(fact, at=now)) for fact in facts))
    await bus.flush(30)


async def notices_on_bus(bus: NatsBus) -> dict[str, Notice]:
    """The notices that a replica has written, by their ids: as the next one would read them."""
    stored = await bus.documents(BUCKET).get(CLUSTER)
    return {notice.id: notice for notice in decode_as(stored.data or b"", NoticesDocument).notices}


async def taken(server: TargetServer, many: int) -> list[tuple[str, str]]:
    """Paths and states of this number of messages."""
    await until_async(lambda: len(server.taken) >= many, f"{many} messages")
    return [(one.path, one.headers.get("idempotency-key", "")) for one in server.taken]


def target_counts(replica: Notifications, target: str = "webhook") -> dict[str, float]:
    """What was counted for one target."""
    return replica.by_target()[target]
