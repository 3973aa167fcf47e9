"""Who may log in, and how a refusal is reported: passwords, credentials, TLS."""

import base64
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import nkeys
import pytest
import trustme

from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError, BusTlsError, CredentialsExpiredError
from everstep.bus.server.dev_server import DevServer
from tests.integration.bus.servers import refused, relay, server_with, store_in
from tests.waiting import until_async


async def test_a_wrong_password(shared_nats: DevServer, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("not-the-password\n")
    settings = BusSettings(url=shared_nats.url, user="service", password_file=wrong)
    error = await refused(settings)
    assert isinstance(error, BusDeniedError)
    assert "refused user service: check user and password_file" in str(error)
    assert "not-the-password" not in str(error)


async def test_a_server_that_reads_its_configuration_again_refuses_once(
    shared_nats: DevServer, tmp_path: Path
) -> None:
    async with relay(shared_nats.url, [b"-ERR 'Authorization Violation'\r\n"]) as url:
        settings = msgspec.structs.replace(shared_nats.settings(SERVICE), url=url)
        async with connect(settings, "health", spool=tmp_path / "spool") as bus:
            assert bus.connected


async def test_no_password_at_all(shared_nats: DevServer) -> None:
    error = await refused(BusSettings(url=shared_nats.url))
    assert isinstance(error, BusDeniedError)
    assert "refused a client without credentials" in str(error)


async def test_a_password_file_that_is_not_there(shared_nats: DevServer, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    error = await refused(BusSettings(url=shared_nats.url, user="x", password_file=gone))
    assert str(error) == (
        f"password_file: the secret in {gone} cannot be read: No such file or directory"
    )


def _pair(kind: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))


def _jwt(claims: dict[str, object], subject: Any, issuer: Any) -> str:
    def part(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    body = {"iss": issuer.public_key.decode(), "sub": subject.public_key.decode(), **claims}
    body["jti"] = (
        base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    )
    head = part(json.dumps({"typ": "JWT", "alg": "ed25519-nkey"}).encode())
    signed = f"{head}.{part(json.dumps(body).encode())}"
    return f"{signed}.{part(issuer.sign(signed.encode()))}"


class Operator:
    """Issues users with an end, as `nsc` would."""

    def __init__(self) -> None:
        self._operator = _pair(nkeys.PREFIX_BYTE_OPERATOR)
        self._account = _pair(nkeys.PREFIX_BYTE_ACCOUNT)
        self._system = _pair(nkeys.PREFIX_BYTE_ACCOUNT)

    def config(self, store: Path) -> dict[str, object]:
        operator = _jwt(
            {"name": "op", "iat": 1, "nats": {"type": "operator", "version": 2}},
            self._operator,
            self._operator,
        )
        limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1, "imports": -1,
                  "exports": -1, "wildcards": True, "mem_storage": -1, "disk_storage": -1,
                  "streams": -1, "consumer": -1}  # fmt: skip

        def account(name: str, key: Any, limits: Mapping[str, object]) -> str:
            claims = {"type": "account", "version": 2, "limits": limits}
            return _jwt({"name": name, "iat": 1, "nats": claims}, key, self._operator)

        no_store = {**limits, "disk_storage": 0, "mem_storage": 0, "streams": 0, "consumer": 0}
        return {
            "operator": operator,
            "resolver": "MEMORY",
            "system_account": self._system.public_key.decode(),
            "resolver_preload": {
                self._account.public_key.decode(): account("a", self._account, limits),
                self._system.public_key.decode(): account("SYS", self._system, no_store),
            },
            "jetstream": store_in(store),
        }

    def write_user(self, path: Path, ends_at: int) -> None:
        user = _pair(nkeys.PREFIX_BYTE_USER)
        rights = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
        claims = {"name": "u", "iat": 1, "exp": ends_at, "nats": rights}
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{_jwt(claims, user, self._account)}\n"
            f"------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n"
            f"{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )


async def test_credentials_that_expired(tmp_path: Path) -> None:
    """The error has the file and the date (A14.8)."""
    operator, creds = Operator(), tmp_path / "user.creds"
    async with server_with(tmp_path, operator.config(tmp_path / "js")) as port:
        operator.write_user(creds, int(time.time()) - 60)
        settings = BusSettings(url=f"nats://127.0.0.1:{port}", credentials_file=creds)
        error = await refused(settings)
    assert isinstance(error, CredentialsExpiredError)
    assert f"the credentials in {creds} expired on 20" in str(error)


async def test_credentials_that_expire_are_read_anew_without_a_restart(tmp_path: Path) -> None:
    """The connection is rebuilt with the new file (A13.6)."""
    operator, creds = Operator(), tmp_path / "user.creds"
    async with server_with(tmp_path, operator.config(tmp_path / "js")) as port:
        settings = BusSettings(
            url=f"nats://127.0.0.1:{port}", credentials_file=creds, reconnect_jitter_s=0.1
        )
        operator.write_user(creds, int(time.time()) + 600)
        async with connect(settings, "setup") as bus:
            await topology.init(bus.jetstream)
        async with AsyncExitStack() as stack:

            async def connected() -> NatsBus:
                operator.write_user(creds, int(time.time()) + 6)
                return await stack.enter_async_context(connect(settings, "rotating"))

            bus = await until_async(
                connected, "it is in before they expire", despite=CredentialsExpiredError
            )
            operator.write_user(creds, int(time.time()) + 600)
            await until_async(
                lambda: bus.statistics()["rebuilds_total"] and bus.connected, "it is rebuilt"
            )
            await bus.prove()


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return authority


def tls_config(folder: Path, authority: trustme.CA, *names: str) -> dict[str, object]:
    issued = authority.issue_cert(*names)
    issued.private_key_pem.write_to_path(folder / "server.key")
    for pem in issued.cert_chain_pems:
        pem.write_to_path(folder / "server.pem", append=True)
    files = {"cert_file": str(folder / "server.pem"), "key_file": str(folder / "server.key")}
    return {"tls": files, "jetstream": store_in(folder / "js")}


async def test_tls_with_our_own_authority(tmp_path: Path, authority: trustme.CA) -> None:
    config = tls_config(tmp_path, authority, "127.0.0.1")
    async with server_with(tmp_path, config) as port:
        settings = BusSettings(url=f"tls://127.0.0.1:{port}", ca_file=tmp_path / "ca.pem")
        async with connect(settings, "tls") as bus:
            assert bus.connected


async def test_a_certificate_that_we_have_no_reason_to_trust(
    tmp_path: Path, authority: trustme.CA
) -> None:
    config = tls_config(tmp_path, authority, "127.0.0.1")
    async with server_with(tmp_path, config) as port:
        error = await refused(BusSettings(url=f"tls://127.0.0.1:{port}", connect_within_s=30))
    assert isinstance(error, BusTlsError)
    assert "Check ca_file" in str(error)


async def test_a_certificate_for_another_host(tmp_path: Path, authority: trustme.CA) -> None:
    config = tls_config(tmp_path, authority, "elsewhere.test")
    async with server_with(tmp_path, config) as port:
        settings = BusSettings(url=f"tls://127.0.0.1:{port}", ca_file=tmp_path / "ca.pem")
        error = await refused(settings)
    assert isinstance(error, BusTlsError)


async def test_a_server_without_tls_hears_no_password(
    shared_nats: DevServer, tmp_path: Path, authority: trustme.CA
) -> None:
    plain = shared_nats.settings("service")
    settings = BusSettings(
        url=plain.url.replace("nats:", "tls:"),
        user=plain.user,
        password_file=plain.password_file,
        ca_file=tmp_path / "ca.pem",
    )
    error = await refused(settings)
    assert isinstance(error, BusTlsError)
    assert "offers no TLS but the settings require it: nothing was sent" in str(error)
