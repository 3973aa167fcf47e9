"""What a job's login can do to others by the headers that nats-server acts on (ADR-0083)."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import nats as nats_py
import pytest
from nats import errors as nats_errors
from nats.aio.client import Client

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.ports import LogScope
from everstep.bus.server.dev_server import DevServer
from everstep.ids import id_from, new_id
from everstep.messages.rank_logs import PIECE_BYTES, LogHeader, LogPiece
from tests.unit.history.facts import make
from tests.waiting import WITHIN_S

A, B = "job-a", "job-b"
OWN = (
    subjects.fact(A, "rank_exited"),
    subjects.blob(A, "0" * 32, 0),
    subjects.log(A, 1, "n1", 0, "stdout"),
    subjects.log_index(A, 1, "n1"),
)
OF_B = subjects.fact(B, "node_lost")
AT_B = {"Nats-Expected-Last-Subject-Sequence-Subject": OF_B}
LAST = "Nats-Expected-Last-Subject-Sequence"
HEADERS: tuple[Mapping[str, str], ...] = (
    {"Nats-Expected-Stream": "KV_LEASES"},
    {LAST: "99"},
    {"Nats-Rollup": "all"},
    {"Nats-Rollup": "sub"},
    {"Nats-TTL": "1s"},
    {"Nats-TTL": "never"},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": OF_B},
    {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": OWN[0], "Nats-Schedule-Source": OF_B},
    {"Nats-Scheduler": OF_B, "Nats-Schedule-Next": "purge"},
    {"Nats-Incr": "1"},
    {"Nats-Counter-Sources": "{}"},
    {"Nats-Batch-Id": "a", "Nats-Batch-Sequence": "1"},
    {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    {"Nats-Batch-Id": "c", "Nats-Batch-Sequence": "9", "Nats-Batch-Commit": "1"},
    {"Nats-Stream-Source": f"FACTS 1 {OF_B} > >"},
    {"Nats-Marker-Reason": "MaxAge"},
    {"KV-Operation": "PURGE"},
    {"Nats-Required-Api-Level": "99"},
    {"Nats-Request-Info": '{"acc":"SYS","svc":"SYS"}'},
    {"Nats-Trace-Dest": "_INBOX.of.a"},
    {"Nats-Trace-Dest": "_INBOX.of.a", "Nats-Trace-Only": "true"},
    {"Nats-Trace-Dest": OF_B},
    {"Nats-Trace-Dest": OWN[0]},
    {"Nats-Sequence": "1", "Nats-Subject": OF_B, "Nats-Stream": "FACTS"},
    {"Nats-Pin-Id": "1"},
    {"Status": "503"},
)  # fmt: skip
"""Those that tell nothing of others. An id that is taken is tried by itself."""
OPEN: tuple[Mapping[str, str], ...] = (
    {"Nats-Expected-Last-Msg-Id": "guess"},
    {LAST: "0", **AT_B},
    {LAST: "0", "Nats-Expected-Last-Subject-Sequence-Subject": f"es.fact.{B}.>"},
)
"""Those by which the server's refusal tells something, as ADR-0083 says."""


class Attacker:
    """A plain client with the login of job A."""

    def __init__(self, client: Client, heard: list[str]) -> None:
        self.client = client
        self.heard = heard

    async def send(self, subject: str, headers: Mapping[str, str]) -> str:
        """The stream's answer; empty where it gives none."""
        try:
            answer = await self.client.request(subject, b"{}", 0.2, headers=dict(headers))
        except nats_errors.Error as error:
            assert isinstance(error, nats_errors.TimeoutError), error
            return ""
        return answer.data.decode()


@pytest.fixture
async def service(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(connect(nats.settings("admin"), "setup"))
        await topology.init(admin.jetstream)
        settings = nats.settings("service")
        yield await stack.enter_async_context(connect(settings, "svc", spool=tmp_path / "spool"))


@pytest.fixture
async def attacker(nats: DevServer, service: NatsBus) -> AsyncIterator[Attacker]:
    heard: list[str] = []

    async def refused(error: Exception) -> None:
        heard.append(str(error))

    login = str((await nats.grant(A)).credentials_file)
    client = await nats_py.connect(nats.url, user_credentials=login, error_cb=refused)
    try:
        yield Attacker(client, heard)
    finally:
        await client.close()


async def stored(bus: NatsBus) -> list[tuple[str, str]]:
    """Subject and id of each fact in the stream, whoever sent it."""
    last = int((await bus.jetstream.api("STREAM.INFO.FACTS"))["state"]["last_seq"])
    found: list[tuple[str, str]] = []
    async with bus.facts(None) as reader:
        at = 0
        while at < last:
            batch = await reader.fetch(1000, 1.0)
            at = batch.position.sequence
            found += [(one.subject, one.data.decode()) for one in batch.facts]
    return found


async def test_no_header_suppresses_delays_or_forges_what_another_job_has(
    service: NatsBus, attacker: Attacker
) -> None:
    facts = [make("node_lost", job=B, id=new_id()) for _ in range(3)]
    await service.record(facts[0])
    await service.flush(WITHIN_S)
    told: dict[str, str] = {}
    for headers in (*HEADERS, *OPEN):
        for subject in OWN:
            told[f"{subject} {dict(headers)}"] = await attacker.send(subject, headers)
    for number in range(60):  # more batches than a stream keeps open
        batch = {"Nats-Batch-Id": f"open-{number}", "Nats-Batch-Sequence": "1"}
        await attacker.client.publish(OWN[0], b"{}", headers=batch)
    await attacker.client.flush()
    for fact in facts[1:]:
        await service.record(fact)
    await service.flush(WITHIN_S)
    kept = [data for subject, data in await stored(service) if subject.split(".")[2] != A]
    assert [fact.id in data for fact, data in zip(facts, kept, strict=True)] == [True] * 3
    for what, answer in told.items():
        assert B not in answer, what
    assert not any(B in line for line in attacker.heard if "permissions violation" not in line)


async def test_only_the_two_headers_of_the_decision_tell_of_others(
    service: NatsBus, attacker: Attacker
) -> None:
    """The id of the newest message, and the newest number of a subject; no other header."""
    await attacker.send(OWN[0], {})  # so that B's number is not that of an empty stream
    fact = make("node_lost", job=B, id=new_id())
    await service.record(fact)
    await service.flush(WITHIN_S)
    answers = [await attacker.send(OWN[0], headers) for headers in OPEN]
    assert fact.id in answers[0]
    assert all('"wrong last sequence: 2"' in answer for answer in answers[1:])
    quiet = [await attacker.send(OWN[0], headers) for headers in HEADERS]
    assert not any(fact.id in answer or "sequence: 2" in answer for answer in quiet)


async def test_no_job_can_take_the_id_of_the_next_piece_of_another_jobs_output(
    service: NatsBus, attacker: Attacker
) -> None:
    """The refusal tells the newest id in the stream: from it no other id follows."""

    def piece(offset: int) -> LogPiece:
        header = LogHeader(file="f" * 16, offset=offset, size=PIECE_BYTES, line=0)
        return LogPiece(
            job=B, round=1, node="n1", rank=0, stream="stdout", header=header, data=b"\n"
        )

    await service.rank_logs.put(piece(0))
    told = (await attacker.send(OWN[2], OPEN[0])).partition("wrong last msg ID: ")[2].split('"')[0]
    assert told
    file = told.partition(".")[0]
    for taken in (f"{file}.{PIECE_BYTES}.{PIECE_BYTES}", id_from(told, str(PIECE_BYTES))):
        await attacker.send(OWN[2], {"Nats-Msg-Id": taken})
    await service.rank_logs.put(piece(PIECE_BYTES))
    page = await service.rank_logs.read(LogScope(B), 0, since_us=None, most_bytes=1 << 20)
    assert [one.piece.header.offset for one in page.pieces] == [0, PIECE_BYTES]
