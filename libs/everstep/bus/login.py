"""From settings to what nats-py's `connect` takes: addresses, credentials, TLS, patience."""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep.bus.errors import BusConfigError
from everstep.bus.settings import BusSettings
from everstep.settings import SettingsError
from everstep.settings import read_secret as read_any_secret


def login(settings: BusSettings) -> dict[str, Any]:
    """Arguments for `nats.connect`. Blocks on files.

    Secrets that rotate are refused once, which closes the client; the next one reads anew.
    """
    servers = addresses(settings.url)
    options: dict[str, Any] = {
        "servers": servers,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": settings.reconnect_wait_s,
        "connect_timeout": min(settings.connect_within_s, 10.0),
        "ping_interval": settings.ping_interval_s,
        "max_outstanding_pings": 3,
        "drain_timeout": 5,
        "pending_size": 8 * 1024 * 1024,
    }
    if settings.user is not None and settings.password_file is not None:
        options["user"] = settings.user
        options["password"] = read_secret(settings.password_file, "password_file")
    if settings.credentials_file is not None:
        read_secret(settings.credentials_file, "credentials_file")
        options["user_credentials"] = str(settings.credentials_file)
    if settings.nkey_seed_file is not None:
        options["nkeys_seed_str"] = read_secret(settings.nkey_seed_file, "nkey_seed_file")
    if settings.ca_file is not None or any(url.startswith("tls:") for url in servers):
        options["tls"] = _tls(settings)
    return options


def addresses(url: str) -> list[str]:
    """The servers in a URL setting, each checked."""
    servers = [part.strip() for part in url.split(",") if part.strip()]
    if not servers:
        raise BusConfigError("url in [bus] is empty: set it to, say, nats://127.0.0.1:4222")
    for server in servers:
        _check(server)
    return servers


def _check(server: str) -> None:
    try:
        parts = urlsplit(server)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_good = urlsplit(""), False
    if parts.scheme not in {"nats", "tls"} or not parts.hostname or not port_is_good:
        raise BusConfigError(
            f"{server!r} is no address of a NATS server: write nats://HOST:PORT, or tls://HOST:PORT"
        )
    if parts.username or parts.password:
        raise BusConfigError(
            f"the URL for {parts.hostname} holds credentials, which would end up in logs: "
            f"set user and password_file in [bus] instead"
        )


def read_secret(path: Path, setting: str) -> str:
    """What a secret file holds, or the error that names its setting."""
    try:
        return read_any_secret(path)
    except SettingsError as error:
        raise BusConfigError(f"{setting}: {error}") from error


def _tls(settings: BusSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ssl.SSLError) as error:
        raise BusConfigError(
            f"the TLS files cannot be used (ca_file {settings.ca_file}, cert_file "
            f"{settings.cert_file}, key_file {settings.key_file}): {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
