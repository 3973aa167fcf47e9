"""Facts on their way: first to this disk, then to the stream, then deleted here.

    record ─▶ [group] ─fsync─▶ spool ─window─▶ stream ─ack─▶ forgotten
                                  ▲               │
                                  └── again, in order, when lost, refused or late

The next window is sent once the whole window is settled, so facts of one process stay in order,
also through a reconnect. The stream recognizes a second copy by its `Nats-Msg-Id`.

A large window is first sent as an atomic batch, which the stream stores with one fsync, or not at
all. After any refusal or silence its facts are sent one by one (ADR-0098).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from everstep import subjects
from everstep.backoff import Backoff, jittered_s
from everstep.bus.background import in_background
from everstep.bus.connection import Connection
from everstep.bus.diagnosis import has_batches
from everstep.bus.errors import (
    BusError,
    BusTimeoutError,
    BusUnreachableError,
    FactsWaitingError,
    MessageTooLargeError,
    NoLeaderError,
    SpoolBusyError,
    SpoolError,
    SpoolWriteError,
)
from everstep.bus.facts.spool import Position, Spool
from everstep.bus.jetstream import pub_ack
from everstep.messages import Fact, kind_of
from everstep.messages.codec import MAX_MESSAGE_BYTES, encode

log = logging.getLogger(__name__)

_WINDOW = 1000
"""Also the most messages of a batch."""
_BATCH_LEAST = 32
"""A batch costs the server some six files, whatever its size."""
_BATCHES_OFF = 10174
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0
_MESSAGE_TOO_LARGE = 10054
_HEADERS_BYTES = 512
_LOCKED_WITHIN_S = 20.0
"""How long another task may hold a spool, to send what is left in it."""
_LOOK_AGAIN_S = 0.05


class _Group:
    """Facts that share one fsync."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.kept = asyncio.Event()
        self.error: SpoolError | None = None


class _Window:
    """Facts sent together, and the outcome of each."""

    def __init__(self, records: list[bytes], *, is_batch: bool) -> None:
        self.waiting = dict(enumerate(records))
        self.is_batch = is_batch
        self.rejected: list[bytes] = []
        self.trouble: BusError | None = None
        self.settled = asyncio.Event()

    def stop(self, trouble: BusError) -> None:
        self.trouble = trouble
        self.settled.set()

    def reject(self, index: int) -> None:
        """The stream will never take this one."""
        record = self.waiting.pop(index, None)
        if record is not None:
            self.rejected.append(record)
        if not self.waiting:
            self.settled.set()


class Outbox:
    """Use `open_outbox`."""

    def __init__(self, connection: Connection, spool: Spool, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._spool = spool
        self._thread = thread
        self._group = _Group()
        self._grew = asyncio.Event()
        self._kept = asyncio.Event()
        self._kept.set()  # an earlier process may have left facts to send
        self._sent = spool.acked
        self._advanced = asyncio.Event()
        self._came_up = asyncio.Event()
        self._window: _Window | None = None
        self._takes_batches = True
        self._number = 0
        self._inbox = f"{connection.inbox_prefix}.{Client().new_inbox().rpartition('.')[2]}"
        self._batches = self._inbox.rpartition(".")[2]
        self._said: set[str] = set()
        self.trouble: BusError | None = None
        self.counters = {"recorded": 0, "acknowledged": 0, "resent": 0, "rejected": 0}

    # -- onto the disk ---------------------------------------------------------------------

    async def record(self, *facts: Fact) -> None:
        records, too_large = [], None
        for fact in facts:
            try:
                records.append(_record_of(fact))
            except MessageTooLargeError as error:  # the others are kept
                too_large = error
        group = self._group
        group.records += records
        self._grew.set()
        await group.kept.wait()
        if group.error is not None:
            raise type(group.error)(*group.error.args)
        self.counters["recorded"] += len(records)
        if too_large is not None:
            raise too_large

    async def keep_for_ever(self) -> None:
        """Write each group with one fsync, while the next one gathers."""
        loop = asyncio.get_running_loop()
        while True:
            await self._grew.wait()
            self._grew.clear()
            group, self._group = self._group, _Group()
            try:
                await loop.run_in_executor(self._thread, self._spool.append, group.records)
            except SpoolError as error:
                group.error = error
                log.error("facts_not_kept count=%d error=%s", len(group.records), error)
            group.kept.set()
            self._kept.set()

    # -- to the stream ---------------------------------------------------------------------

    async def send_for_ever(self) -> None:
        while True:
            await self._kept.wait()
            self._kept.clear()
            try:
                while await self._send_some():
                    pass
            except OSError as error:  # a failing disk must not end the training
                self._complain(SpoolWriteError(f"the spool cannot be used: {error.strerror}"))
                await asyncio.sleep(_RETRY_MAX_S)
                self._kept.set()

    async def _send_some(self) -> bool:
        """False when there was nothing to send."""
        loop = asyncio.get_running_loop()
        records, end = await loop.run_in_executor(
            self._thread, self._spool.read, self._sent, _WINDOW
        )
        if records:
            await self._deliver(records)
        await loop.run_in_executor(self._thread, self._forget, end)
        self._advanced.set()
        return bool(records)

    def _forget(self, end: Position) -> None:
        self._sent = end
        self._spool.acknowledge(end)

    async def _deliver(self, records: list[bytes]) -> None:
        """Return when the stream has stored or finally rejected every record."""
        window = _Window(records, is_batch=len(records) >= _BATCH_LEAST and self._takes_batches)
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            await self._connection.wait_connected()
            self._came_up.clear()
            window.is_batch &= has_batches(self._connection.client)
            await self._send(window)
            was_batch, window.is_batch = window.is_batch, False
            if window.rejected:
                await self._set_aside(window)
            if not window.waiting:
                self.trouble = None
                return
            if was_batch and window.trouble is None:
                continue
            self._complain(window.trouble)
            self.counters["resent"] += len(window.waiting)
            try:
                async with asyncio.timeout(jittered_s(backoff.failed())):
                    await self._came_up.wait()
                    backoff.reset()
            except TimeoutError:
                continue

    async def _send(self, window: _Window) -> None:
        """Send the unsettled records once, and wait until all are answered or an error occurs."""
        self._number += 1
        self._window = window
        window.trouble = None
        window.settled.clear()
        sent_at = asyncio.get_running_loop().time()
        limit_s = self._connection.settings.request_within_s
        reply = f"{self._inbox}.{self._number}."
        try:
            client = self._connection.client
            async with asyncio.timeout(limit_s):
                for message in self._messages(window, reply):
                    await client.publish(*message)
                if window.waiting:
                    await window.settled.wait()
        except TimeoutError:
            window.trouble = BusTimeoutError(f"the stream did not answer within {limit_s:g} s")
        except nats_errors.Error as error:
            window.trouble = BusUnreachableError(f"cannot send facts: {error}")
        except BusError as error:
            window.trouble = error
        finally:
            self._window = None
            if isinstance(window.trouble, BusTimeoutError | NoLeaderError):
                self._connection.unanswered(sent_at)

    def _messages(
        self, window: _Window, reply: str
    ) -> Iterator[tuple[str, bytes, str, dict[str, str]]]:
        """Return what is published for each waiting record; one answer is asked for a batch."""
        last = len(window.waiting)
        for number, (index, record) in enumerate(list(window.waiting.items()), 1):
            subject, id_, data = record.split(b"\n", 2)
            headers = {"Nats-Msg-Id": id_.decode()}
            if window.is_batch:
                batch = f"{self._batches}-{self._number}"
                headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
                if number == last:
                    headers["Nats-Batch-Commit"] = "1"
            is_asked = number == last or not window.is_batch
            yield subject.decode(), data, f"{reply}{index}" if is_asked else "", headers

    async def on_ack(self, message: Msg) -> None:
        number, _, index = message.subject.rpartition(".")
        window = self._window
        if window is None or not number.endswith(f".{self._number}"):
            return  # it answers an earlier attempt, which is being repeated
        ack = pub_ack(message)
        if ack is None:
            window.stop(NoLeaderError("the stream of facts"))
        elif ack.error is None:
            settled = list(window.waiting) if window.is_batch else [int(index)]
            for position in settled:
                window.waiting.pop(position, None)
            self._connection.acknowledged()
            self.counters["acknowledged"] += len(settled)
        elif window.is_batch:
            self._takes_batches = ack.error.err_code != _BATCHES_OFF
            window.settled.set()
        elif ack.error.err_code == _MESSAGE_TOO_LARGE:
            self._say_rejected(ack.error.description)
            window.reject(int(index))
        else:
            problem = ack.error
            window.stop(
                BusUnreachableError(
                    f"the stream refuses facts: {problem.description} (code {problem.err_code})"
                )
            )
        if not window.waiting:
            window.settled.set()

    async def _set_aside(self, window: _Window) -> None:
        records, window.rejected = window.rejected, []
        self.counters["rejected"] += len(records)
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._spool.set_aside, records
        )

    def _say_rejected(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.error("facts_rejected reason=%s kept=%s", reason, self._spool.rejected)

    def _complain(self, trouble: BusError | None) -> None:
        if str(trouble) != str(self.trouble):
            log.warning("facts_waiting bytes=%d reason=%s", self.pending_bytes, trouble)
        self.trouble = trouble

    # -- events of the connection ---------------------------------------------------------

    def came_up(self) -> None:
        self._takes_batches = True
        self._came_up.set()

    def went_down(self) -> None:
        if self._window is not None:
            self._window.stop(BusUnreachableError("the connection to the bus is lost"))

    def denied(self, subject: str) -> None:
        """Set aside and log facts that we may not publish, so that the others go on."""
        window = self._window
        if window is None or not subject.startswith("es.fact."):
            return
        self._say_rejected(f"we may not publish to {subject}")
        for index, record in list(window.waiting.items()):
            if record.partition(b"\n")[0].decode().lower() == subject:
                window.reject(index)
        if window.is_batch:
            window.settled.set()  # it lacks that fact, so nobody stores it

    # -- for the owner ---------------------------------------------------------------------

    @property
    def inbox(self) -> str:
        return self._inbox

    @property
    def pending_bytes(self) -> int:
        return self._spool.pending_bytes

    async def flush(self, within_s: float) -> None:
        end = self._spool.end
        try:
            async with asyncio.timeout(within_s):
                while self._sent < end:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            raise FactsWaitingError(
                f"facts ({self.pending_bytes} bytes) are safe in the spool but not yet in the "
                f"stream after {within_s:g} s: {self._why_waiting()}"
            ) from None

    def _why_waiting(self) -> str:
        if not self._connection.connected:
            return self._connection.trouble or f"no connection to {self._connection.settings.url}"
        return str(self.trouble or "still sending")


def _record_of(fact: Fact) -> bytes:
    data = encode(fact)
    subject = subjects.fact(fact.job, kind_of(fact))
    limit = MAX_MESSAGE_BYTES - _HEADERS_BYTES
    if len(data) > limit:
        raise MessageTooLargeError(subject, len(data), limit)
    return f"{subject}\n{fact.id}\n".encode() + data


@asynccontextmanager
async def open_outbox(connection: Connection, folder: Path) -> AsyncIterator[Outbox]:
    """Open the outbox of one process. Facts that an earlier process left are sent first."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
    try:
        spool = await _opened(thread, folder, connection.settings.spool_max_bytes)
        try:
            outbox = Outbox(connection, spool, thread)
            with connection.noticing(
                up=outbox.came_up, down=outbox.went_down, denied=outbox.denied
            ):
                async with (
                    connection.subscribed(f"{outbox.inbox}.*.*", outbox.on_ack),
                    in_background(outbox.keep_for_ever(), outbox.send_for_ever()),
                ):
                    yield outbox
        finally:
            await asyncio.shield(loop.run_in_executor(thread, spool.close))
    finally:
        thread.shutdown(wait=False)  # its last act, closing the spool, is over


async def _opened(thread: ThreadPoolExecutor, folder: Path, max_bytes: int) -> Spool:
    """Open the spool; wait while another task sends what is left in it, or just closes it."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _LOCKED_WITHIN_S
    while True:
        opening = thread.submit(Spool.open, folder, max_bytes=max_bytes)
        try:
            return await asyncio.wrap_future(opening)
        except SpoolBusyError:
            if loop.time() > until:
                raise
            await asyncio.sleep(_LOOK_AGAIN_S)
        except asyncio.CancelledError:
            thread.submit(_close_if_open, opening)  # nobody else knows of it
            raise


def _close_if_open(opening: Future[Spool]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
