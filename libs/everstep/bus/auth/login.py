"""Turns settings into the arguments of nats-py's `connect`: addresses, logins, TLS, limits."""

import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep.bus.auth.keys import Credentials
from everstep.bus.errors import BusConfigError
from everstep.bus.settings import BusSettings
from everstep.settings import SettingsError
from everstep.settings import read_secret as read_any_secret


class Login:
    """How one connection logs in. A renewed login is used from the next connect on."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self.credentials: Credentials | None = None

    @property
    def name(self) -> str:
        """The name of our login, for people."""
        if self.settings.user is not None:
            return self.settings.user
        claims = self.credentials.claims if self.credentials else None
        if claims is not None and claims.name:
            return claims.name
        return str(self.settings.credentials_file or "(anonymous)")

    @property
    def kept_at(self) -> Path | None:
        """Where a renewed login is written."""
        return self.settings.renewed_credentials_file or self.settings.credentials_file

    def options(self) -> dict[str, Any]:
        """Arguments for `nats.connect`. Blocks on files.

        After a rotation the server refuses the old secret, which closes the client; the next
        client reads the files again.
        """
        options = _options(self.settings)
        if self.settings.credentials_file is not None:
            self.read()
            options["user_jwt_cb"] = self._token
            options["signature_cb"] = self._signature
        return options

    def read(self) -> Credentials:
        """Return the newest login: from the file, or renewed since."""
        assert self.settings.credentials_file is not None
        candidates = [read_credentials(self.settings.credentials_file)]
        kept = self.settings.renewed_credentials_file
        if kept is not None and kept.exists():
            candidates.append(read_credentials(kept, "renewed_credentials_file"))
        if self.credentials is not None:
            candidates.append(self.credentials)
        self.credentials = max(candidates, key=_issued_at)
        return self.credentials

    def renewed(self, token: str) -> None:
        """Use this renewed token from now on, and store it. Blocks on files."""
        assert self.credentials is not None
        self.credentials = Credentials(token, self.credentials.seed)
        assert self.kept_at is not None
        write_private(self.kept_at, self.credentials.text())

    def forget(self) -> None:
        """Forget the login that the server refused: only the files count."""
        self.credentials = None

    def _token(self) -> bytes:
        assert self.credentials is not None
        return self.credentials.token.encode()

    def _signature(self, nonce: str) -> bytes:
        assert self.credentials is not None
        return self.credentials.answer(nonce)


def _issued_at(credentials: Credentials) -> int:
    claims = credentials.claims
    return 0 if claims is None else claims.iat


def read_credentials(path: Path, setting: str = "credentials_file") -> Credentials:
    """The login in a `.creds` file, or the error that names its setting."""
    credentials = Credentials.parsed(read_secret(path, setting))
    if credentials is None or credentials.claims is None:
        raise BusConfigError(
            f"{setting}: {path} holds no NATS credentials: make them with `everstep bus login`"
        )
    return credentials


def _options(settings: BusSettings) -> dict[str, Any]:
    servers = addresses(settings.url)
    options: dict[str, Any] = {
        "servers": servers,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": settings.reconnect_wait_s,
        "connect_timeout": min(settings.connect_within_s, 10.0),
        "ping_interval": settings.ping_interval_s,
        "max_outstanding_pings": 2,  # the third that is missed ends the connection
        "drain_timeout": 5,
        "pending_size": 8 * 1024 * 1024,
    }
    if settings.user is not None and settings.password_file is not None:
        options["user"] = settings.user
        options["password"] = read_secret(settings.password_file, "password_file")
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
            f"{server!r} is not the address of a NATS server: write nats://HOST:PORT or tls://HOST:PORT"
        )
    if parts.username or parts.password:
        raise BusConfigError(
            f"the URL for {parts.hostname} holds credentials, which would end up in logs: "
            f"set user and password_file in [bus] instead"
        )


def read_secret(path: Path, setting: str) -> str:
    """The content of a secret file, or the error that names its setting."""
    try:
        return read_any_secret(path)
    except SettingsError as error:
        raise BusConfigError(f"{setting}: {error}") from error


def write_private(path: Path, text: str, *, keep: bool = False) -> None:
    """Replace a file atomically; only our user can read it, from its first byte.

    With `keep` an existing file stays, also when several processes make it at the same time.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if not keep:
        temporary.replace(path)
        return
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        pass  # another process was quicker; its file serves as well
    finally:
        temporary.unlink()


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
