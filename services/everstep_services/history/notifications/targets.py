"""Each target: what a message to it looks like on the wire. Secrets are read at each attempt."""

import hashlib
import hmac
from datetime import datetime
from pathlib import Path
from typing import assert_never
from urllib.parse import urlsplit

import msgspec

from everstep.settings import SettingsError, read_secret, remember_secret
from everstep_services.history.notifications import payloads
from everstep_services.history.notifications.http_client import HttpRequest
from everstep_services.history.notifications.notices import Delivery
from everstep_services.history.notifications.settings import NotifySettings, Target

SIGNATURE = "Everstep-Signature"
TIMESTAMP = "Everstep-Timestamp"


def signed_headers(secret: str, body: bytes, timestamp_s: int) -> dict[str, str]:
    """The headers that prove who sent a body, and when."""
    signed = f"{timestamp_s}.".encode() + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    return {TIMESTAMP: str(timestamp_s), SIGNATURE: f"sha256={digest}"}


UPDATES_MOST: dict[Target, int] = {"webhook": 1, "slack": 1, "pagerduty": 5, "alertmanager": 5}
"""How many messages a target gets about changed causes: one, if each is a further message."""
CORRECTED: frozenset[str] = frozenset({"webhook", "slack"})
"""Targets that show each message: only these hear of a cause that changes after the end."""
SECRET_LEAST_BYTES = 16
_JSON = {"Content-Type": "application/json"}


def request_for(delivery: Delivery, settings: NotifySettings, now: datetime) -> HttpRequest:
    """The request, its secrets read from their files. To be called in a thread."""
    target: Target = delivery.target  # type: ignore[assignment]  # made from the settings' targets
    headers = {**_JSON, "Idempotency-Key": delivery.key}
    dashboard = settings.dashboard_url
    match target:
        case "webhook":
            return _webhook(delivery, settings, headers, now)
        case "slack":
            assert settings.slack.url_file is not None
            url = secret_url(settings.slack.url_file)
            return HttpRequest(url, _encoded(payloads.slack(delivery, dashboard)), headers=headers)
        case "pagerduty":
            assert settings.pagerduty.routing_key_file is not None
            key = read_secret(settings.pagerduty.routing_key_file)
            body = _encoded(payloads.pagerduty(delivery, dashboard, key))
            return HttpRequest(settings.pagerduty.url, body, headers=headers)
        case "alertmanager":
            alert = payloads.alertmanager(delivery.notice, dashboard, now)
            return alerts_request([alert], settings, headers)
        case _:
            assert_never(target)


def alerts_request(
    alerts: list[dict[str, object]], settings: NotifySettings, headers: dict[str, str]
) -> HttpRequest:
    """A POST of alerts to Alertmanager."""
    file = settings.alertmanager.authorization_file
    if file is not None:
        value = read_secret(file)
        remember_secret(value.rpartition(" ")[2])
        headers = {**headers, "Authorization": value}
    url = f"{settings.alertmanager.url.rstrip('/')}/api/v2/alerts"
    return HttpRequest(url, _encoded(alerts), headers={**_JSON, **headers})


def ping_request(settings: NotifySettings) -> HttpRequest:
    """A ping to the service that misses us when we are gone."""
    assert settings.dead_man.url_file is not None
    return HttpRequest(secret_url(settings.dead_man.url_file), method=settings.dead_man.method)


def check_secrets(settings: NotifySettings) -> None:
    """Refuse secrets that protect nothing, before a message is signed with one. Reads files."""
    file = settings.webhook.secret_file
    if file is not None and file.exists():
        webhook_secret(file)


def webhook_secret(file: Path) -> str:
    """The secret that signs messages to the webhook."""
    secret = read_secret(file)
    size = len(secret.encode())
    if size < SECRET_LEAST_BYTES:
        raise SettingsError(
            f"notify.webhook.secret_file: the secret in {file} has {size} bytes, and needs at "
            f"least {SECRET_LEAST_BYTES}: `openssl rand -hex 32 > {file}` makes one"
        )
    return secret


def secret_url(file: Path) -> str:
    """An address that is a secret."""
    url = read_secret(file)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise SettingsError(f"{file} holds no address that begins with http:// or https://")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise SettingsError(f"the address in {file} contains spaces")
    remember_secret(parts.path)  # a server may repeat it in its answer
    return url


def _webhook(
    delivery: Delivery, settings: NotifySettings, headers: dict[str, str], now: datetime
) -> HttpRequest:
    webhook = settings.webhook
    url = webhook.url if webhook.url_file is None else secret_url(webhook.url_file)
    make = payloads.health_events if webhook.format == "health_events" else payloads.webhook
    body = _encoded(make(delivery, settings.dashboard_url))
    if webhook.secret_file is not None:
        secret = webhook_secret(webhook.secret_file)
        headers = {**headers, **signed_headers(secret, body, int(now.timestamp()))}
    return HttpRequest(url, body, headers=headers)


def _encoded(body: object) -> bytes:
    return msgspec.json.encode(body)
