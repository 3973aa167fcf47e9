"""Reading the stream of facts: in order, without gaps, from the reader's own position.

The reader stores its position with the facts (history: in the same transaction), so the server
keeps none: each reader is a short-lived ordered consumer that is made again, from the next
fact, after any error (ADR-0005).
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from everstep.bus.errors import BusError, BusTimeoutError, BusUnreachableError
from everstep.bus.jetstream import JetStream
from everstep.bus.ports import Delivered, FactBatch, StreamPosition
from everstep.bus.topology import FACTS_STREAM

log = logging.getLogger(__name__)

_INACTIVE_S = 60
_GRACE_S = 2.0
_LEADS_NO_LONGER_S = 30.0
"""A server notices within 20 s that it leads no longer."""


class NatsFactReader:
    """See `everstep.bus.ports.FactReader`. Use `open_reader`; one fetch at a time."""

    def __init__(self, jetstream: JetStream, after: StreamPosition | None) -> None:
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._inbox = f"{self._connection.inbox_prefix}.{Client().new_inbox().rpartition('.')[2]}"
        self._position = after
        self._consumer = ""
        self._made = 0  # consumers so far: part of the inbox, so that an old consumer is not heard
        self._delivered = 0  # by this consumer
        self._owed = 0  # by the open request
        self._arrived: deque[Delivered] = deque()
        self._changed = asyncio.Event()
        self._lost = True
        self._set_back_since: float | None = None

    @property
    def inbox(self) -> str:
        return self._inbox

    async def fetch(self, most: int, within_s: float) -> FactBatch:
        if self._lost:
            await self._connection.wait_connected()
            await self._begin_again()
        if not self._owed and len(self._arrived) < most:
            await self._request(most, within_s)
        try:
            async with asyncio.timeout(within_s + _GRACE_S):
                while not self._arrived and self._owed and not self._lost:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self._lost = True  # the server owed us at least a status
        return self._take(most)

    async def _begin_again(self) -> None:
        info = await self._jetstream.api(f"STREAM.INFO.{FACTS_STREAM}")
        created, last = str(info["created"]), int(info["state"]["last_seq"])
        position = self._position
        if position is None or position.stream != created:
            position = StreamPosition(created, 0)
        elif position.sequence > last:
            self._believe_set_back(position, last, int(info["config"]["num_replicas"]))
            log.warning("stream_went_back from=%d to=%d", position.sequence, last)
            position = StreamPosition(created, 0)  # the same numbers now mean other facts
        await self._drop_consumer()
        self._made += 1
        self._consumer = f"reader-{self._inbox.rpartition('.')[2]}-{self._made}"
        config = {
            "name": self._consumer,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": position.sequence + 1,
            "inactive_threshold": _INACTIVE_S * 1_000_000_000,
            "mem_storage": True,
            "num_replicas": 1,
        }
        await self._jetstream.api(
            f"CONSUMER.CREATE.{FACTS_STREAM}.{self._consumer}",
            {"stream_name": FACTS_STREAM, "config": config, "action": "create"},
        )
        self._set_back_since = None
        self._position = position
        self._delivered = self._owed = 0
        self._arrived.clear()
        self._lost = False

    def _believe_set_back(self, position: StreamPosition, last: int, copies: int) -> None:
        """Raise unless the stream has certainly lost facts.

        With several copies, a server that has not noticed that it leads no longer lags.
        """
        now = asyncio.get_running_loop().time()
        if self._set_back_since is None:
            self._set_back_since = now
        if copies > 1 and now - self._set_back_since < _LEADS_NO_LONGER_S:
            raise BusTimeoutError(
                f"the leader of {FACTS_STREAM} has facts up to {last}, and {position.sequence} was "
                f"read: another server may lead"
            )

    async def _request(self, most: int, within_s: float) -> None:
        self._owed = most
        try:
            await self._connection.client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{FACTS_STREAM}.{self._consumer}",
                msgspec.json.encode({"batch": most, "expires": int(within_s * 1e9)}),
                reply=f"{self._inbox}.{self._made}",
            )
        except nats_errors.Error as error:
            self._lost = True
            raise BusUnreachableError(f"cannot ask for facts: {error}") from error

    def _take(self, most: int) -> FactBatch:
        assert self._position is not None
        facts = [self._arrived.popleft() for _ in range(min(most, len(self._arrived)))]
        missed = 0
        if facts:
            before = self._position.sequence
            if before:  # a reader that starts at the beginning misses nothing
                missed = facts[-1].sequence - before - len(facts)
            self._position = StreamPosition(self._position.stream, facts[-1].sequence)
        return FactBatch(self._position, facts, missed)

    async def on_message(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK."):
            self._on_fact(message)
        elif message.subject.endswith(f".{self._made}"):
            # 404 and 408 end a request that found no more facts; other statuses are errors.
            status = (message.headers or {}).get("Status")
            self._owed = 0
            self._lost = status not in {"404", "408"}
            self._changed.set()

    def _on_fact(self, message: Msg) -> None:
        consumer, sequence, delivered = _origin(message.reply)
        if consumer != self._consumer or self._lost:
            return  # from a consumer that was given up
        if delivered != self._delivered + 1:
            self._lost = True
        else:
            self._delivered = delivered
            self._owed -= 1
            self._arrived.append(Delivered(sequence, message.subject, message.data))
        self._changed.set()

    def lose(self) -> None:
        self._lost = True
        self._changed.set()

    async def close(self) -> None:
        if self._connection.connected:
            await self._drop_consumer()

    async def _drop_consumer(self) -> None:
        if self._consumer:
            try:
                await self._jetstream.api(f"CONSUMER.DELETE.{FACTS_STREAM}.{self._consumer}")
            except BusError as error:
                log.debug("reader_not_deleted error=%s", error)  # it ends by inactivity


def _origin(reply: str) -> tuple[str, int, int]:
    """Consumer, stream sequence and consumer sequence, from where an ack would go.

    `$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<times>.<stream seq>.<consumer seq>.…`
    """
    fields = reply.split(".")
    first = 2 if len(fields) == 9 else 4
    return fields[first + 1], int(fields[first + 3]), int(fields[first + 4])


@asynccontextmanager
async def open_reader(
    jetstream: JetStream, after: StreamPosition | None
) -> AsyncIterator[NatsFactReader]:
    reader = NatsFactReader(jetstream, after)
    connection = jetstream.connection
    with connection.noticing(up=reader.lose, down=reader.lose):
        async with connection.subscribed(f"{reader.inbox}.*", reader.on_message):
            try:
                yield reader
            finally:
                await reader.close()
