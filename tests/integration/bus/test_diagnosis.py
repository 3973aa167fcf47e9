"""Each way of not getting onto the bus has its own line, in time (A2.7, A14.8)."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
import zstandard
from nats.aio.transport import TcpTransport

from everstep import subjects
from everstep.bus import BusSettings, connect, connection, diagnosis, topology
from everstep.bus.auth.login import read_secret
from everstep.bus.auth.roles import SERVICE
from everstep.bus.errors import (
    BlobMissingError,
    BusConfigError,
    BusDeniedError,
    BusTimeoutError,
    BusUnreachableError,
    JetStreamOffError,
    MessageTooLargeError,
    NoLeaderError,
    NoStreamError,
    ServerTooOldError,
    TopologyError,
)
from everstep.bus.server.dev_server import DevServer
from everstep.messages import BlobRef
from tests.integration.bus.servers import (
    refused,
    relay,
    reload,
    server_with,
    speaking,
    stopped,
    store_in,
)
from tests.waiting import WITHIN_S, until_async


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "url in .bus. is empty"),
        ("localhost", "'localhost' is not the address of a NATS server: write nats://HOST:PORT"),
        ("nats://h:99999", "is not the address of a NATS server"),
        ("nats://me:secret@h:4222", "holds credentials, which would end up in logs"),
    ],
)
async def test_a_url_that_cannot_work(url: str, said: str) -> None:
    error = await refused(BusSettings(url=url))
    assert isinstance(error, BusConfigError)
    assert "secret" not in str(error)
    with pytest.raises(BusConfigError, match=said):
        raise error


def test_a_url_of_another_scheme_is_refused_with_the_settings() -> None:
    with pytest.raises(ValueError, match="http:// is not an address of a bus"):
        BusSettings(url="http://localhost:4222")


async def test_a_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "is_final", bool)  # as if time were up with the first error
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        error = await refused(BusSettings(url=url, connect_within_s=30))
    assert isinstance(error, BusUnreachableError)
    assert f"nothing listens at {url}: start a server with `everstep up`" in str(error)


async def test_a_host_that_does_not_exist() -> None:
    settings = BusSettings(url="nats://no-such-host.invalid:4222", connect_within_s=1)
    error = await refused(settings)
    assert isinstance(error, BusUnreachableError | BusTimeoutError)
    assert "no-such-host.invalid" in str(error)


async def test_something_else_than_nats() -> None:
    async with speaking(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        error = await refused(BusSettings(url=url, connect_within_s=30))
    assert isinstance(error, BusUnreachableError)
    assert f"the server at {url} is not a NATS server" in str(error)


async def test_a_server_that_dies_before_it_says_a_word_is_tried_again(
    shared_nats: DevServer,
) -> None:
    settings = msgspec.structs.replace(shared_nats.settings(SERVICE), reconnect_wait_s=0.01)
    async with (
        relay(shared_nats.url, [None, None]) as url,
        connect(msgspec.structs.replace(settings, url=url), "test") as bus,
    ):
        assert bus.connected


async def test_a_try_that_fails_as_time_is_up_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `wait_for` answers then as if it had not been cancelled: it went on for ever."""

    async def cut_at_the_same_time(transport: TcpTransport) -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return b""
        raise AssertionError

    monkeypatch.setattr(TcpTransport, "readline", cut_at_the_same_time)
    async with speaking(b"") as url, asyncio.timeout(30):
        error = await refused(BusSettings(url=url, connect_within_s=0.3, reconnect_wait_s=0.01))
    assert isinstance(error, BusTimeoutError)


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
    """The line names the option that is missing (A1.5)."""
    async with server_with(tmp_path, {}) as port:
        error = await refused(BusSettings(url=f"nats://127.0.0.1:{port}"))
    assert isinstance(error, JetStreamOffError)
    assert "runs without JetStream: start it with `-js`" in str(error)


class TestAnAccountWithoutJetStream:
    """Its server may still be setting that up: all agents of a new job come at once."""

    @pytest.fixture
    async def account(self, tmp_path: Path) -> AsyncIterator[BusSettings]:
        secret = tmp_path / "secret"
        secret.write_text("p")
        secret.chmod(0o600)
        async with server_with(tmp_path, self.config(tmp_path, has_jetstream=False)) as port:
            yield BusSettings(url=f"nats://127.0.0.1:{port}", user="u", password_file=secret)

    @staticmethod
    def config(folder: Path, *, has_jetstream: bool) -> dict[str, object]:
        account = {"users": [{"user": "u", "password": "p"}], "jetstream": has_jetstream}
        return {
            "jetstream": store_in(folder),
            "accounts": {"A": account, "SYS": {"users": [{"user": "s", "password": "s"}]}},
            "system_account": "SYS",
        }

    async def test_is_named_when_that_lasts(
        self, account: BusSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "JETSTREAM_WITHIN_S", 0.0)
        error = await refused(account)
        assert isinstance(error, JetStreamOffError)
        assert "is off for" in str(error)

    async def test_is_asked_again_until_it_has_it(
        self,
        account: BusSettings,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(connection, "JETSTREAM_WITHIN_S", WITHIN_S)
        caplog.set_level("INFO", connection.log.name)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.connected(account))
            await until_async(lambda: "bus_waits_for_jetstream" in caplog.text, "it waits")
            await reload(tmp_path, self.config(tmp_path, has_jetstream=True))

    @staticmethod
    async def connected(settings: BusSettings) -> None:
        async with connect(settings, "test") as bus:
            assert bus.connected


async def test_an_account_that_may_not_ask_jetstream_is_told_so_at_once(tmp_path: Path) -> None:
    who = {"user": "u", "password": "p", "permissions": {"publish": {"deny": "$JS.API.INFO"}}}
    config = {"jetstream": store_in(tmp_path), "authorization": {"users": [who]}}
    secret = tmp_path / "secret"
    secret.write_text("p")
    secret.chmod(0o600)
    async with server_with(tmp_path, config) as port:
        url = f"nats://127.0.0.1:{port}"
        settings = BusSettings(url=url, user="u", password_file=secret, connect_within_s=600)
        error = await refused(settings)
    assert isinstance(error, BusDeniedError)
    assert f"user u must be allowed to publish $JS.API.INFO at {url}" in str(error)


async def test_a_server_that_says_nothing_more_has_not_denied_anything(
    nats: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = diagnosis.check_account

    async def check(*arguments: Any) -> None:
        await stopped(nats.pid)
        try:
            await real(*arguments)
        finally:
            os.kill(nats.pid, signal.SIGCONT)

    monkeypatch.setattr(connection, "check_account", check)
    settings = msgspec.structs.replace(nats.settings(SERVICE), connect_within_s=5.0)
    error = await refused(settings)
    assert isinstance(error, BusTimeoutError)
    assert f"{settings.url} did not answer within 5 s" in str(error)


async def test_a_missing_stream_has_its_name(nats: DevServer, job: str) -> None:
    async with connect(nats.settings("service"), "test") as bus:
        with pytest.raises(NoStreamError, match="KV_ROUNDS does not exist .* `everstep bus init`"):
            await bus.documents("ROUNDS").get(job)
        with pytest.raises(NoLeaderError, match=r"stream for \$KV.ROUNDS.* or it was never made"):
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
            TopologyError, match="cannot be set up: STREAM.CREATE.FACTS: the server refused"
        ):
            await topology.init(bus.jetstream, replicas=3)  # it is not a cluster


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"\xff\xfe", "is not text"), (b"x" * 100_000, "is larger than 64 KiB")],
)
def test_secrets_are_short_text(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(BusConfigError, match=f"^password_file: .*{said}"):
        read_secret(path, "password_file")


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("bomb", "is not 1000 bytes long"),
        ("rubbish", "cannot be opened"),
        ("cut short", "cannot be opened"),
    ],
)
async def test_a_blob_that_lies_costs_an_error_and_no_memory(
    shared_nats: DevServer, job: str, lie: str, said: str
) -> None:
    stored = await asyncio.to_thread(lying, lie)
    ref = BlobRef(job=job, id=xxhash.xxh3_128_hexdigest(stored), size_bytes=1000, parts=1)
    async with connect(shared_nats.settings("service"), "test") as bus:
        await bus.jetstream.publish(subjects.blob(job, ref.id, 0), stored)
        with pytest.raises(BlobMissingError, match=said):
            await bus.blobs.get(ref)


def lying(how: str) -> bytes:
    """What is stored instead of 1000 bytes."""
    match how:
        case "bomb":
            squeezed = zstandard.ZstdCompressor().compressobj(size=1 << 30)
            pieces = [squeezed.compress(bytes(1 << 20)) for _ in range(1 << 10)]
            return b"".join(pieces) + squeezed.flush()
        case "rubbish":
            return b"no zstd frame at all"
        case _:
            return zstandard.compress(b"y" * 1000)[:-3]


async def test_a_blob_whose_bytes_are_others_than_its_name_says(
    shared_nats: DevServer, job: str
) -> None:
    ref = BlobRef(job=job, id="0" * 32, size_bytes=5, parts=1)
    async with connect(shared_nats.settings("service"), "test") as bus:
        await bus.jetstream.publish(subjects.blob(job, ref.id, 0), zstandard.compress(b"forged"))
        with pytest.raises(BlobMissingError, match="is damaged: its hash does not match"):
            await bus.blobs.get(ref)
