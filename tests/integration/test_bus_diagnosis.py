"""Each way of not getting onto the bus has its own line, in time."""

import asyncio
import base64
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from operator import not_
from pathlib import Path
from typing import Any

import msgspec
import nkeys
import pytest
import trustme
import xxhash
import zstandard

from everstep import subjects
from everstep.bus import BusSettings, connect, topology
from everstep.bus.devserver import DevServer, _port_in, find_program
from everstep.bus.errors import (
    BlobMissingError,
    BusConfigError,
    BusDeniedError,
    BusError,
    BusTimeoutError,
    BusTlsError,
    BusUnreachableError,
    CredentialsExpiredError,
    JetStreamOffError,
    MessageTooLargeError,
    NoStreamError,
    ServerTooOldError,
    TopologyError,
)
from everstep.bus.login import read_secret
from everstep.bus.roles import SERVICE
from everstep.messages import BlobRef
from tests.waiting import until_async

WITHIN_S = 3.0


async def refused(settings: BusSettings) -> BusError:
    """The error that connecting raises, within the ten seconds that a person will wait."""
    async with asyncio.timeout(10):
        with pytest.raises(BusError) as caught:
            async with connect(settings, "test"):
                pass
    assert "\n" not in str(caught.value)
    return caught.value


@asynccontextmanager
async def server_with(folder: Path, config: dict[str, object]) -> AsyncIterator[int]:
    """A nats-server with a configuration of the test's own; its port."""
    path = folder / "nats.json"
    await asyncio.to_thread(path.write_text, json.dumps({"listen": "127.0.0.1:-1", **config}))
    process = await asyncio.create_subprocess_exec(
        *[find_program(), "-c", str(path), "--ports_file_dir", str(folder)],
        stderr=asyncio.subprocess.DEVNULL,
    )
    ports = folder / f"nats-server_{process.pid}.ports"
    try:
        yield await until_async(lambda: asyncio.to_thread(_port_in, ports), "it has a port")
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def speaking(first: bytes) -> AsyncIterator[str]:
    """Something that listens, says `first`, and is no NATS server of ours."""

    clients: set[asyncio.Task[None] | None] = set()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(asyncio.current_task())
        writer.write(first)
        await reader.read()
        writer.close()
        clients.discard(asyncio.current_task())

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await until_async(lambda: clients, "every client has closed its socket", holds=not_)


@asynccontextmanager
async def relay(url: str, refusals: list[bytes]) -> AsyncIterator[str]:
    """The server at that address, after it has refused as many clients."""
    host, port = url.removeprefix("nats://").split(":")
    clients: set[asyncio.Task[None] | None] = set()

    async def pipe(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            to.write(data)
        to.close()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection(host, int(port))
        if refusals:
            writer.write(await from_server.readline() + refusals.pop())
            to_server.close()
            writer.close()
        else:
            await asyncio.gather(pipe(reader, to_server), pipe(from_server, writer))
        clients.discard(asyncio.current_task())

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert not refusals
    await until_async(lambda: clients, "every client has closed its socket", holds=not_)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "url in .bus. is empty"),
        ("localhost", "'localhost' is no address of a NATS server: write nats://HOST:PORT"),
        ("http://localhost:4222", "is no address of a NATS server"),
        ("nats://h:99999", "is no address of a NATS server"),
        ("nats://me:secret@h:4222", "holds credentials, which would end up in logs"),
    ],
)
async def test_a_url_that_cannot_work(url: str, said: str) -> None:
    error = await refused(BusSettings(url=url))
    assert isinstance(error, BusConfigError)
    assert "secret" not in str(error)
    with pytest.raises(BusConfigError, match=said):
        raise error


async def test_a_closed_port() -> None:
    async with speaking(b"") as url:
        pass
    error = await refused(BusSettings(url=url, connect_within_s=0.3))
    assert isinstance(error, BusUnreachableError)
    assert f"nothing listens at {url}: start a server with `everstep up`" in str(error)


async def test_a_host_that_does_not_exist() -> None:
    settings = BusSettings(url="nats://no-such-host.invalid:4222", connect_within_s=1)
    error = await refused(settings)
    assert isinstance(error, BusUnreachableError | BusTimeoutError)
    assert "no-such-host.invalid" in str(error)


async def test_something_else_than_nats() -> None:
    async with speaking(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        error = await refused(BusSettings(url=url, connect_within_s=WITHIN_S))
    assert isinstance(error, BusUnreachableError)
    assert f"what answers at {url} is not a NATS server" in str(error)


async def test_something_that_never_says_a_word() -> None:
    async with speaking(b"") as url:
        error = await refused(BusSettings(url=url, connect_within_s=0.3))
    assert isinstance(error, BusTimeoutError)
    assert "did not answer within 0.3 s" in str(error)


async def test_a_server_that_is_too_old() -> None:
    info = {"server_id": "x", "version": "2.9.25", "proto": 1, "max_payload": 1 << 20, "port": 1}

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        error = await refused(BusSettings(url=f"nats://127.0.0.1:{port}"))
    assert isinstance(error, ServerTooOldError)
    assert "is NATS 2.9.25; Everstep needs 2.11 or newer" in str(error)


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    async with server_with(tmp_path, {}) as port:
        error = await refused(BusSettings(url=f"nats://127.0.0.1:{port}"))
    assert isinstance(error, JetStreamOffError)
    assert "runs without JetStream: start it with `-js`" in str(error)


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


# -- credentials with an end ---------------------------------------------------------------


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
            "jetstream": {"store_dir": str(store)},
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
    operator, creds = Operator(), tmp_path / "user.creds"
    async with server_with(tmp_path, operator.config(tmp_path / "js")) as port:
        operator.write_user(creds, int(time.time()) - 60)
        settings = BusSettings(url=f"nats://127.0.0.1:{port}", credentials_file=creds)
        error = await refused(settings)
    assert isinstance(error, CredentialsExpiredError)
    assert f"the credentials in {creds} expired on 20" in str(error)


async def test_credentials_that_expire_are_read_anew_without_a_restart(tmp_path: Path) -> None:
    operator, creds = Operator(), tmp_path / "user.creds"
    async with server_with(tmp_path, operator.config(tmp_path / "js")) as port:
        operator.write_user(creds, int(time.time()) + 2)
        settings = BusSettings(
            url=f"nats://127.0.0.1:{port}", credentials_file=creds, reconnect_jitter_s=0.1
        )
        async with connect(settings, "rotating") as bus:
            await topology.init(bus.jetstream)
            operator.write_user(creds, int(time.time()) + 600)
            await until_async(
                lambda: bus.statistics()["rebuilds_total"] and bus.connected, "it is rebuilt"
            )
            await bus.prove()


# -- TLS -----------------------------------------------------------------------------------


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
    return {"tls": files, "jetstream": {"store_dir": str(folder / "js")}}


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
        error = await refused(BusSettings(url=f"tls://127.0.0.1:{port}", connect_within_s=3))
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
    assert "offers no TLS but the settings ask for it: nothing was sent" in str(error)


# -- streams -------------------------------------------------------------------------------


async def test_a_missing_stream_has_its_name(nats: DevServer, job: str) -> None:
    async with connect(nats.settings("service"), "test") as bus:
        with pytest.raises(NoStreamError, match="KV_ROUNDS does not exist .* `everstep bus init`"):
            await bus.documents("ROUNDS").get(job)
        with pytest.raises(NoStreamError, match=r"a stream for \$KV.ROUNDS"):
            await bus.documents("ROUNDS").put(job, b"", revision=0)
        async with bus.facts(None) as reader:
            with pytest.raises(NoStreamError, match="FACTS"):
                await reader.fetch(1, 0.1)


@pytest.mark.parametrize("size", [(1 << 20) - 40, 2 << 20])
async def test_a_document_too_large_for_the_bus(
    shared_nats: DevServer, job: str, size: int
) -> None:
    async with connect(shared_nats.settings("service"), "test") as bus:
        with pytest.raises(MessageTooLargeError, match="put the content into a blob"):
            await bus.documents("ROUNDS").put(job, os.urandom(size), revision=0)
        await bus.prove()  # and the connection is still there


async def test_setting_up_twice_changes_nothing_and_a_changed_stream_is_corrected(
    nats: DevServer,
) -> None:
    async with connect(nats.settings("admin"), "test") as bus:
        made = await topology.init(bus.jetstream)
        assert all(line.endswith(" made") for line in made)
        kept = await topology.init(bus.jetstream)
        assert all(line.endswith(" kept") for line in kept)
        config = (await bus.jetstream.api("STREAM.INFO.FACTS"))["config"]
        await bus.jetstream.api("STREAM.UPDATE.FACTS", {**config, "max_age": 600_000_000_000})
        assert "FACTS corrected" in await topology.init(bus.jetstream)


async def test_a_server_that_cannot_do_what_is_asked_is_told_on(nats: DevServer) -> None:
    async with connect(nats.settings("admin"), "test") as bus:
        with pytest.raises(
            TopologyError,
            match="cannot be set up: STREAM.CREATE.FACTS: the server refused",
        ):
            await topology.init(bus.jetstream, replicas=3)  # it is no cluster


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"\xff\xfe", "is not text"), (b"x" * 100_000, "is larger than 64 KiB")],
)
def test_secrets_are_short_text(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(BusConfigError, match=f"^password_file: .*{said}"):
        read_secret(path, "password_file")


# -- blobs that lie ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (zstandard.compress(b"x" * (1 << 30)), "is not 1000 bytes long"),
        (b"no zstd frame at all", "cannot be opened"),
        (zstandard.compress(b"y" * 1000)[:-3], "cannot be opened"),
    ],
    ids=["bomb", "rubbish", "cut short"],
)
async def test_a_blob_that_lies_costs_an_error_and_no_memory(
    shared_nats: DevServer, job: str, stored: bytes, said: str
) -> None:
    ref = BlobRef(job=job, id=xxhash.xxh3_128_hexdigest(stored), size_bytes=1000, parts=1)
    async with connect(shared_nats.settings("service"), "test") as bus:
        await bus.jetstream.publish(subjects.blob(job, ref.id, 0), stored)
        with pytest.raises(BlobMissingError, match=said):
            await bus.blobs.get(ref)


async def test_a_blob_whose_bytes_are_others_than_its_name_says(
    shared_nats: DevServer, job: str
) -> None:
    ref = BlobRef(job=job, id="0" * 32, size_bytes=5, parts=1)
    async with connect(shared_nats.settings("service"), "test") as bus:
        await bus.jetstream.publish(subjects.blob(job, ref.id, 0), zstandard.compress(b"forged"))
        with pytest.raises(BlobMissingError, match="is damaged: its hash does not match"):
            await bus.blobs.get(ref)
