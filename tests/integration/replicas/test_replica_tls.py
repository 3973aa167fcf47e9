"""Agents that speak TLS with each other: with those of their authority alone, and in person."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from msgspec.structs import replace

from everstep.messages import Peer
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.transfer.tls import TlsFilesError, opened_tls
from tests.integration.replicas.nodes import PATIENT, Node, made, order, running, state_of
from tests.waiting import until_async


def issued(folder: Path, authority: trustme.CA) -> CheckpointSettings:
    """A certificate of this authority, and its files."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = authority.issue_cert("node.test")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    ours.cert_chain_pems[0].write_to_path(folder / "node.pem")
    ours.private_key_pem.write_to_path(folder / "node.key")
    return replace(
        PATIENT,
        ca_file=folder / "ca.pem",
        cert_file=folder / "node.pem",
        key_file=folder / "node.key",
    )


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def pair(
    tmp_path: Path, one: CheckpointSettings, other: CheckpointSettings
) -> tuple[Node, Node]:
    return await node(tmp_path, "one", one), await node(tmp_path, "other", other)


async def node(tmp_path: Path, name: str, settings: CheckpointSettings) -> Node:
    return await asyncio.to_thread(made, name, tmp_path / name, settings)


async def failure_between(one: Node, other: Node, at: Callable[[], Peer] | None = None) -> str:
    """What a node hears that sends a state to another, and cannot."""
    async with running([one, other]):
        other.keep.begins(order(1))
        one.keep.begins(order(0, peers=[other.peer(1) if at is None else at()]))
        one.save(0, 10)
        _, _, reason, cause = await until_async(
            lambda: one.failed[0], "it is reported", despite=IndexError
        )
    assert not other.held(0, 0)
    return f"{cause}: {reason}"


@asynccontextmanager
async def between(
    to: Node, incoming: ssl.SSLContext | None = None, outgoing: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Peer, list[bytes]]]:
    """Somebody who passes everything on, and sees it."""
    seen: list[bytes] = []

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while octets := await source.read(1 << 16):
            seen.append(octets)
            target.write(octets)
        target.close()

    async def relay(source: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        answers, target = await asyncio.open_connection("127.0.0.1", to.port, ssl=outgoing)
        await asyncio.gather(
            pass_on(source, target), pass_on(answers, back), return_exceptions=True
        )

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=incoming)
    try:
        port = server.sockets[0].getsockname()[1]
        yield Peer(node=to.name, slot=1, address="127.0.0.1", port=port), seen
    finally:
        server.close()


async def test_a_state_is_sent_held_and_fetched_and_nobody_else_reads_it(
    tmp_path: Path, authority: trustme.CA
) -> None:
    one, other = await pair(
        tmp_path, issued(tmp_path / "1", authority), issued(tmp_path / "2", authority)
    )
    new = await node(tmp_path, "new", issued(tmp_path / "3", authority))
    async with running([one, other, new]), between(other) as (there, seen):
        other.keep.begins(order(1))
        one.keep.begins(order(0, peers=[there]))
        one.save(0, 10)
        assert await other.has_held(0, 0, 10) == state_of(0, 10)
        new.keep.begins(order(0, round=2, sources=[other.peer(1)]))
        assert (await new.has_offer(2)).complete
    assert new.held(0, 0) == {10: state_of(0, 10)}
    wire = b"".join(seen)
    assert len(wire) > len(state_of(0, 10))
    assert b"other" not in wire
    assert state_of(0, 10)[:64] not in wire


async def test_an_agent_without_tls_is_refused_and_both_say_why(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    said = await failure_between(*await pair(tmp_path, PATIENT, issued(tmp_path / "2", authority)))
    assert said.startswith("closed: other at 127.0.0.1:")
    assert "it is of another job, or speaks TLS, and we do not" in said
    lines = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert lines[0].startswith("replica_caller_refused from=127.0.0.1 error=no TLS with it (")
    assert "give all agents of the job agent.checkpoints.ca_file" in lines[0]


async def test_nothing_is_sent_to_an_agent_without_tls(
    tmp_path: Path, authority: trustme.CA
) -> None:
    said = await failure_between(*await pair(tmp_path, issued(tmp_path / "1", authority), PATIENT))
    assert said.startswith("tls: other at 127.0.0.1:")
    assert "no TLS with it (" in said


async def test_a_certificate_of_another_authority_is_not_taken(
    tmp_path: Path, authority: trustme.CA
) -> None:
    one = issued(tmp_path / "1", authority)
    other = issued(tmp_path / "2", trustme.CA())
    assert (await failure_between(*await pair(tmp_path, one, other))).startswith("tls: ")


async def test_a_caller_that_only_its_holder_does_not_know_is_refused(
    tmp_path: Path, authority: trustme.CA
) -> None:
    stranger = trustme.CA()
    other = issued(tmp_path / "2", authority)
    one = replace(issued(tmp_path / "1", stranger), ca_file=tmp_path / "both.pem")
    (tmp_path / "both.pem").write_bytes(authority.cert_pem.bytes() + stranger.cert_pem.bytes())
    said = await failure_between(*await pair(tmp_path, one, other))
    assert said.startswith(("tls: ", "closed: "))


async def test_nobody_in_between_passes_the_proof_on_not_even_with_a_good_certificate(
    tmp_path: Path, authority: trustme.CA
) -> None:
    one, other = await pair(
        tmp_path, issued(tmp_path / "1", authority), issued(tmp_path / "2", authority)
    )
    incoming, outgoing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    outgoing.check_hostname = False
    for context in (incoming, outgoing):
        authority.issue_cert("third.test").configure_cert(context)
        authority.configure_trust(context)
    async with running([one, other]), between(other, incoming, outgoing) as (there, seen):
        other.keep.begins(order(1))
        one.keep.begins(order(0, peers=[there]))
        one.save(0, 10)
        _, _, reason, cause = await until_async(
            lambda: one.failed[0], "it is reported", despite=IndexError
        )
    assert len(b"".join(seen)) >= 2 * (32 + 32)  # numbers and proofs have been passed on
    assert cause == "closed"
    assert "before we were heard" in reason
    assert not other.held(0, 0)


# -- files -----------------------------------------------------------------------------------------


def damaged(folder: Path, authority: trustme.CA, what: str) -> CheckpointSettings:
    good = issued(folder, authority)
    key, cert = folder / "node.key", folder / "node.pem"
    match what:
        case "no key":
            key.unlink()
        case "a key of another certificate":
            authority.issue_cert("x.test").private_key_pem.write_to_path(key)
        case "a key with a password":
            plain = serialization.load_pem_private_key(key.read_bytes(), None)
            key.write_bytes(
                plain.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.BestAvailableEncryption(b"secret"),
                )
            )
        case "no certificate":
            cert.write_text("nothing of the kind")
        case "no authority":
            (folder / "ca.pem").write_text("")
        case _:
            trustme.CA().cert_pem.write_to_path(folder / "ca.pem")
    return good


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no key", r"agent.checkpoints.key_file \S+/node.key: No such file or directory"),
        ("a key of another certificate", "are not a certificate and its key: key values mismatch"),
        ("a key with a password", "are not a certificate and its key: "),
        ("no certificate", "are not a certificate and its key: "),
        ("no authority", "agent.checkpoints.ca_file .* has no certificate of an authority"),
        ("another authority", "does not take our own cert_file .*: .*unable to get local issuer"),
    ],
)
def test_files_that_are_missing_or_wrong_are_one_line_at_the_start(
    tmp_path: Path, authority: trustme.CA, what: str, said: str
) -> None:
    settings = damaged(tmp_path, authority, what)
    with pytest.raises(TlsFilesError, match=said) as error:
        opened_tls(settings)
    assert "\n" not in str(error.value)


def test_the_three_files_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="belong together: set key_file as well"):
        CheckpointSettings(ca_file=tmp_path / "ca.pem", cert_file=tmp_path / "node.pem")
    assert opened_tls(CheckpointSettings()) is None


async def test_files_that_were_replaced_are_read_again_once_they_fit_each_other(
    tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    folder, later = tmp_path / "2", trustme.CA()
    one, other = await pair(tmp_path, issued(tmp_path / "1", authority), issued(folder, authority))
    issued(tmp_path / "next", later)
    (tmp_path / "next" / "node.pem").rename(folder / "node.pem")  # its key is still the old one
    async with running([one, other]):
        other.keep.begins(order(1))
        one.keep.begins(order(0, peers=[other.peer(1)]))
        one.save(0, 10)
        await other.has_held(0, 0, 10)
        assert "tls_files_passed_over" in caplog.text
        for name in ("node.key", "ca.pem"):
            (tmp_path / "next" / name).rename(folder / name)
        new = await node(tmp_path, "new", issued(tmp_path / "3", later))
        async with running([new]):
            new.keep.begins(order(0, round=2, sources=[other.peer(1)]))
            assert (await new.has_offer(2)).complete
