"""The real bus: one connection, and everything that a process does on it."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from nats import errors as nats_errors
from nats.aio.msg import Msg

from everstep import spans, subjects
from everstep.bus import requests
from everstep.bus.auth.login_renewal import renew_for_ever
from everstep.bus.auth.roles import job_in
from everstep.bus.background import in_background
from everstep.bus.blobs import NatsBlobs
from everstep.bus.connection import Connection, open_connection
from everstep.bus.documents import Bucket
from everstep.bus.errors import BusTimeoutError, BusUnreachableError, MessageTooLargeError
from everstep.bus.facts.outbox import Outbox, open_outbox
from everstep.bus.facts.reader import NatsFactReader, open_reader
from everstep.bus.inbox import BoundedInbox, Counted
from everstep.bus.jetstream import JetStream, open_jetstream
from everstep.bus.leases import NatsLeases
from everstep.bus.ports import PROOF_BYTES, SERVER_GRACE_S, Handler, M, StreamPosition
from everstep.bus.rank_logs import NatsRankLogs
from everstep.bus.settings import BusSettings
from everstep.bus.topology import PROBE
from everstep.messages import Fact, Message, tag_of
from everstep.messages.codec import MAX_MESSAGE_BYTES, encode

log = logging.getLogger(__name__)

_BEATS_KEPT = 4096
_BURST = 512
_MARK = "Everstep-Acknowledge"
_SILENT_S = 1.5
"""The leader of a stream hears each server once a second."""
_HEARD = b"+"


class NatsBus:
    """See `everstep.bus.ports.Bus`. Use `connect`."""

    def __init__(self, connection: Connection, jetstream: JetStream, outbox: Outbox | None) -> None:
        self._connection = connection
        self._jetstream = jetstream
        self._outbox = outbox
        self._leases = NatsLeases(jetstream)
        self._blobs = NatsBlobs(jetstream)
        self._rank_logs = NatsRankLogs(jetstream)
        self._inboxes: list[Counted] = []
        self._beats: deque[tuple[str, bytes, dict[str, str]]] = deque()
        self._has_beats = asyncio.Event()
        self._counters = {
            "sent": 0,
            "send_dropped": 0,
            "heard": 0,
            "heard_dropped": 0,
            "undecodable": 0,
        }

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def returns(self) -> int:
        counters = self._connection.counters
        return counters["reconnects"] + counters["rebuilds"]

    async def wait_connected(self) -> None:
        await self._connection.wait_connected()

    @property
    def jetstream(self) -> JetStream:
        """Sets up streams; services do not need it."""
        return self._jetstream

    # -- beats -----------------------------------------------------------------------------

    def send(self, subject: str, message: Message) -> None:
        data = encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageTooLargeError(subject, len(data), MAX_MESSAGE_BYTES)
        if len(self._beats) >= _BEATS_KEPT:
            self._beats.popleft()
            self._counters["send_dropped"] += 1
        self._beats.append((subject, data, spans.headers()))
        self._has_beats.set()

    async def send_for_ever(self) -> None:
        while True:
            await self._has_beats.wait()
            await self._connection.wait_connected()
            client = self._connection.client
            try:
                for _ in range(min(_BURST, len(self._beats))):
                    subject, data, headers = self._beats.popleft()
                    await client.publish(subject, data, headers=headers or None)
                    self._counters["sent"] += 1
            except nats_errors.Error as error:
                self._counters["send_dropped"] += 1
                log.debug("beat_lost error=%s", error)
            if not self._beats:
                self._has_beats.clear()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def subscribe(
        self, subject: str, of: type[M], *, capacity: int = 4096
    ) -> AsyncIterator[BoundedInbox[M]]:
        inbox = BoundedInbox(subject, of, capacity)

        async def on_message(message: Msg) -> None:
            with _received(message):
                if inbox.put(message.subject, message.data):
                    await _acknowledge(self._connection, message)

        self._inboxes.append(inbox)
        try:
            # A message without headers asks for no acknowledgement.
            async with self._connection.subscribed(subject, on_message, inbox.hear):
                yield inbox
        finally:
            self._inboxes.remove(inbox)
            self._count(inbox)

    async def deliver(self, subject: str, message: Message, *, within_s: float) -> bool:
        about = {"everstep.job": subjects.job_of(subject)}
        with spans.span(f"deliver {tag_of(message)}", "client", about):
            is_there = await _deliver(self._jetstream, subject, message, within_s=within_s)
        if not is_there and self._connection.choice.is_cluster:
            self._refuse_if_changed(subject)
            await self.prove_servers()
            self._refuse_if_changed(subject)  # the proof waits until a short cut has healed
        return is_there

    def _refuse_if_changed(self, subject: str) -> None:
        changed_s = asyncio.get_running_loop().time() - self._connection.choice.changed_at
        if changed_s < SERVER_GRACE_S:
            raise BusUnreachableError(
                f"nobody subscribes to {subject}, but a server of the bus went or came "
                f"{changed_s:.1f} s ago: its clients may be alive"
            )

    # -- facts -----------------------------------------------------------------------------

    async def record(self, *facts: Fact) -> None:
        await self._box.record(*facts)

    async def flush(self, within_s: float) -> None:
        await self._box.flush(within_s)

    def facts(self, after: StreamPosition | None) -> AbstractAsyncContextManager[NatsFactReader]:
        return open_reader(self._jetstream, after)

    @property
    def _box(self) -> Outbox:
        assert self._outbox is not None, "connect with a spool to record facts"
        return self._outbox

    # -- questions, documents, leases, blobs -------------------------------------------------

    async def ask(
        self, service: str, verb: str, question: Message, of: type[M], *, job: str, within_s: float
    ) -> M:
        return await requests.ask(
            self._jetstream, service, verb, question, of, job=job, within_s=within_s
        )

    def answer(
        self, service: str, handlers: Mapping[str, Handler]
    ) -> AbstractAsyncContextManager[None]:
        return requests.answering(self._jetstream, service, handlers)

    def documents(self, bucket: str) -> Bucket:
        is_agent = job_in(self._connection.login.name) is not None
        return Bucket(self._jetstream, bucket, from_any_copy=is_agent)

    @property
    def leases(self) -> NatsLeases:
        return self._leases

    @property
    def blobs(self) -> NatsBlobs:
        return self._blobs

    @property
    def rank_logs(self) -> NatsRankLogs:
        return self._rank_logs

    # -- how it is -------------------------------------------------------------------------

    async def prove(self, size_bytes: int = PROOF_BYTES) -> None:
        bucket = self.documents(PROBE)
        key = self._connection.name.replace(".", "-")
        revision = await bucket.put(key, os.urandom(size_bytes), revision=None)
        document = await bucket.get(key)
        if document.revision < revision:
            raise BusTimeoutError(f"the bus stored {PROBE}/{key} but does not return it")

    async def prove_servers(self) -> None:
        await self.prove(0)
        if not self._connection.choice.is_cluster:
            return
        group = (await self._jetstream.api(f"STREAM.INFO.KV_{PROBE}")).get("cluster") or {}
        for copy in group.get("replicas") or ():
            silent_s = copy.get("active", 0) / 1e9
            if _SILENT_S < silent_s < SERVER_GRACE_S:
                raise BusTimeoutError(
                    f"server {copy['name']} of the bus has been silent for {silent_s:.1f} s: its "
                    f"clients may be alive"
                )

    def statistics(self) -> dict[str, float]:
        """Counters and levels, for `/metrics`."""
        now = dict(self._counters)
        for inbox in self._inboxes:
            now["heard"] += inbox.received
            now["heard_dropped"] += inbox.dropped
            now["undecodable"] += inbox.undecodable
        now |= self._connection.counters
        levels: dict[str, float] = {
            "connected": float(self.connected),
            "beats_waiting": len(self._beats),
            "unacknowledged_seconds": self._connection.silent_s,
        }
        if self._outbox is not None:
            now |= {f"facts_{key}": value for key, value in self._outbox.counters.items()}
            levels["facts_pending_bytes"] = self._outbox.pending_bytes
        return levels | {f"{key}_total": float(value) for key, value in now.items()}

    def _count(self, inbox: Counted) -> None:
        self._counters["heard"] += inbox.received
        self._counters["heard_dropped"] += inbox.dropped
        self._counters["undecodable"] += inbox.undecodable


@asynccontextmanager
async def connect(
    settings: BusSettings, name: str, *, spool: Path | None = None, wait: bool = True
) -> AsyncIterator[NatsBus]:
    """Connect one process to the bus; the server lists the connection under `name`.

    With `wait`, a bus that cannot be reached within `connect_within_s` raises the error that says
    why; without, the connection opens as soon as it can. Facts wait in `spool`, or in a folder
    of this process's name in the settings' `spool_dir`; without either, this process records none.
    """
    folder = spool
    if folder is None and settings.spool_dir is not None:
        folder = settings.spool_for(name)
    async with (
        open_connection(settings, name, wait=wait) as connection,
        open_jetstream(connection) as jetstream,
    ):
        if folder is None:
            bus = NatsBus(connection, jetstream, None)
            async with in_background(bus.send_for_ever(), renew_for_ever(jetstream)):
                yield bus
            return
        async with open_outbox(connection, folder) as outbox:
            bus = NatsBus(connection, jetstream, outbox)
            async with in_background(bus.send_for_ever(), renew_for_ever(jetstream)):
                yield bus


# Acknowledged messages. The sender marks its message and gives it a reply subject of its job; the
# process that puts it into an inbox answers at once. Messages without the mark are not answered: a
# fact on its way to the stream has a reply subject, too, and its sender would take such an answer
# for the stream's.


async def _deliver(
    jetstream: JetStream, subject: str, message: Message, *, within_s: float
) -> bool:
    """See `everstep.bus.ports.Bus.deliver`."""
    connection = jetstream.connection
    is_settled = connection.back_for_s > _others_back_s(connection)
    reply = await jetstream.acknowledged(
        subject, encode(message), headers={_MARK: "1"} | spans.headers(), within_s=within_s
    )
    if (reply.headers or {}).get("Status") != "503":
        return True
    if not is_settled:
        # After the server was away, each client reconnects at a random moment.
        raise BusUnreachableError(
            f"nobody subscribes to {subject} yet, but the connection to {connection.settings.url} "
            f"was lost less than {_others_back_s(connection):g} s ago: other clients may still be "
            f"reconnecting"
        )
    return False


async def _acknowledge(connection: Connection, message: Msg) -> None:
    """Tell the sender that its message is in an inbox here, if it asked for that."""
    if not message.reply or _MARK not in (message.headers or {}):
        return
    if not connection.connected:  # there is no server that could carry the answer
        return
    try:
        await connection.client.publish(message.reply, _HEARD)
    except nats_errors.Error as error:
        log.debug("acknowledgement_lost subject=%s error=%s", message.subject, error)


@contextmanager
def _received(message: Msg) -> Iterator[None]:
    """A span for a message whose sender has one; nothing for all others."""
    parent = (message.headers or {}).get(spans.HEADER)
    if parent is None:
        yield
        return
    about = {"everstep.job": subjects.job_of(message.subject)}
    kind = message.subject.split(".")[1]
    with spans.span(f"receive {kind}", "server", about, parent=parent):
        yield


def _others_back_s(connection: Connection) -> float:
    settings = connection.settings
    return settings.reconnect_jitter_s + 2 * settings.reconnect_wait_s
