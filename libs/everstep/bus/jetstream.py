"""Requests to the server itself: store a message, read the last one, make a stream."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus.connection import Connection
from everstep.bus.diagnosis import NOT_AVAILABLE
from everstep.bus.errors import (
    BusDeniedError,
    BusError,
    BusRefusedError,
    BusTimeoutError,
    BusUnreachableError,
    JetStreamOffError,
    MessageTooLargeError,
    NobodyAnswersError,
    NoLeaderError,
    NoStreamError,
)

WRITTEN_BEFORE = 10071
"""The leader's copy has a later message of the subject: most servers have stored that one."""
IN_PROCESS = 10164
"""The leader has proposed a message of the subject, and perhaps no other server has it."""
STREAM_NOT_FOUND = 10059
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_NO_MESSAGE = 10037
_OF_STREAMS = ("$JS.API.", "$KV.")
_ASKED_AGAIN_S = 0.1
"""No server answers for a leader that it has not yet given up, or passes the question on to it."""


class Problem(msgspec.Struct, frozen=True):
    """An error of JetStream's API."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    """JetStream's answer to one message: where it is stored, or why it is not."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Problem | None = None


_PUB_ACK = msgspec.json.Decoder(PubAck)


def pub_ack(message: Msg) -> PubAck | None:
    """Return the acknowledgement in a reply; None when no stream captures that subject."""
    if message.headers and message.headers.get("Status") == "503":
        return None
    try:
        return _PUB_ACK.decode(message.data)
    except (msgspec.DecodeError, ValueError) as error:
        raise BusRefusedError(message.subject, 0, f"its answer cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as a stream holds it."""

    sequence: int
    data: bytes
    headers: Mapping[str, str]
    at: str = ""
    """When it was stored, by the server's clock; later times are greater strings."""

    @classmethod
    def of(cls, headers: Mapping[str, str], data: bytes) -> "Stored":
        """From a message that the server sends with its place in the stream."""
        at = headers.get("Nats-Time-Stamp", "")
        return cls(int(headers["Nats-Sequence"]), data, headers, at.removesuffix("Z"))


class _Read(msgspec.Struct, frozen=True):
    seq: int
    time: str
    data: bytes = b""
    hdrs: bytes = b""


class _ReadAnswer(msgspec.Struct, frozen=True):
    message: _Read | None = None
    error: Problem | None = None


_READ = msgspec.json.Decoder(_ReadAnswer)


@dataclass(frozen=True, slots=True)
class StoredSeries:
    """Messages in the order of their stream, and how many more of the kind there are."""

    messages: Sequence[Stored]
    pending: int


class JetStream:
    """Use `open_jetstream`. Each call ends within the settings' `request_within_s`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox = f"{connection.inbox_prefix}.{Client().new_inbox().rpartition('.')[2]}"
        self._tokens = itertools.count(1)
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # by reply subject
        self._series: dict[str, tuple[str, asyncio.Queue[Msg | BusError]]] = {}  # by reply subject
        self._hears = AsyncExitStack()
        self._may_hear = asyncio.Lock()
        self._heard_by: str | None = None

    @property
    def inbox(self) -> str:
        return self._inbox

    @property
    def connection(self) -> Connection:
        return self._connection

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float | None = None,
        reply_to: Callable[[str], str] | None = None,
        is_read: bool = False,
    ) -> Msg:
        """Return one reply, or raise the reason why there is none: lost, refused, or late.

        With `is_read`, a cluster is asked again until it answers: another server leads soon.

        The reply arrives in our inbox, or at the subject that `reply_to` makes of a token.
        """
        if not self._connection.connected:
            raise BusUnreachableError(f"no connection to {self._connection.settings.url}")
        client = self._connection.client
        size = len(data) + _size_of(headers)
        if size > client.max_payload:
            raise MessageTooLargeError(subject, size, client.max_payload)
        limit_s = within_s or self._connection.settings.request_within_s
        token = str(next(self._tokens))
        answered_at = f"{self._inbox}.{token}" if reply_to is None else reply_to(token)
        reply: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[answered_at] = (subject, reply)
        again_s = _ASKED_AGAIN_S if is_read and self._connection.choice.is_cluster else None
        send = partial(
            client.publish, subject, data, reply=answered_at, headers=dict(headers or {}) or None
        )
        try:
            async with asyncio.timeout(limit_s):
                await send()
                while again_s is not None and not (await asyncio.wait([reply], timeout=again_s))[0]:
                    await send()
                return await reply
        except TimeoutError as error:
            raise BusTimeoutError(f"no answer to {subject} within {limit_s:g} s") from error
        except nats_errors.Error as error:
            raise BusUnreachableError(f"cannot send {subject}: {error}") from error
        finally:
            self._waiting.pop(answered_at, None)

    async def acknowledged(
        self, subject: str, data: bytes, *, headers: Mapping[str, str], within_s: float
    ) -> Msg:
        """As `request`, but to agents, which answer from their job's account and its subjects."""
        if not self._connection.connected:
            raise BusUnreachableError(f"no connection to {self._connection.settings.url}")
        job = subjects.job_of(subject)
        try:
            async with asyncio.timeout(within_s):
                inbox = await self._heard_at()
        except TimeoutError as error:
            raise BusTimeoutError(f"no answer to {subject} within {within_s:g} s") from error
        return await self.request(
            subject,
            data,
            headers=headers,
            within_s=within_s,
            reply_to=lambda token: subjects.heard(job, inbox, token),
        )

    async def _heard_at(self) -> str:
        async with self._may_hear:
            if self._heard_by is None:
                inbox = self._inbox.rpartition(".")[2]
                subject = subjects.heard_by(inbox)
                await self._hears.enter_async_context(
                    self._connection.subscribed(subject, self.on_reply)
                )
                self._heard_by = inbox
        return self._heard_by

    async def close(self) -> None:
        """Stop receiving acknowledgements."""
        await self._hears.aclose()

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """Store one message. `BusRefusedError` holds JetStream's own code."""
        sent_at = asyncio.get_running_loop().time()
        try:
            ack = pub_ack(await self.request(subject, data, headers=headers))
        except BusTimeoutError:
            self._connection.unanswered(sent_at)
            raise
        if ack is None:
            self._connection.unanswered(sent_at)
            raise NoLeaderError(f"the stream for {subject}")
        if ack.error is not None:
            raise BusRefusedError(subject, ack.error.err_code, ack.error.description)
        self._connection.acknowledged()
        return ack

    async def publish_if(
        self, subject: str, data: bytes, expected: int, headers: Mapping[str, str] | None = None
    ) -> int | None:
        """Store if `expected` is the subject's last sequence; return None when it is not."""
        try:
            ack = await self.publish(
                subject, data, headers={**(headers or {}), EXPECTED: str(expected)}
            )
        except BusRefusedError as error:
            if error.code in {WRITTEN_BEFORE, IN_PROCESS}:
                return None
            raise
        return ack.seq

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message of a subject, as the stream's leader knows it."""
        request = msgspec.json.encode({"last_by_subj": subject})
        reply = await self.request(f"$JS.API.STREAM.MSG.GET.{stream}", request, is_read=True)
        if (reply.headers or {}).get("Status") == "503":
            raise JetStreamOffError(f"JetStream is not ready at {self._connection.settings.url}")
        try:
            answer = _READ.decode(reply.data)
        except (msgspec.DecodeError, ValueError) as error:
            raise BusRefusedError(stream, 0, f"its answer cannot be read: {error}") from error
        if answer.error is not None:
            if answer.error.err_code == _NO_MESSAGE:
                return None
            raise _refusal(stream, answer.error)
        message = answer.message
        if message is None:
            raise BusRefusedError(stream, 0, "its answer has no message")
        return Stored(
            message.seq, message.data, _headers(message.hdrs), message.time.removesuffix("Z")
        )

    async def last_anywhere(self, stream: str, subject: str) -> Stored | None:
        """As `last`, but from any copy of the stream, which may lag behind its leader."""
        reply = await self.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
        headers = reply.headers or {}
        status = headers.get("Status")
        if status == "404":
            return None
        if status == "503":
            raise NoLeaderError(stream)
        if status is not None:
            raise BusRefusedError(
                stream, int(status), headers.get("Description", "no reason given")
            )
        return Stored.of(headers, reply.data)

    async def several(self, stream: str, body: Mapping[str, Any]) -> "StoredSeries":
        """Read messages of a stream in one request, without a consumer (ADR-31 of NATS).

        `body` says which: `next_by_subj` with `seq` or `start_time`, or `multi_last`.
        """
        if not self._connection.connected:
            raise BusUnreachableError(f"no connection to {self._connection.settings.url}")
        subject, answered_at = f"$JS.API.DIRECT.GET.{stream}", f"{self._inbox}.{next(self._tokens)}"
        answers: asyncio.Queue[Msg | BusError] = asyncio.Queue()
        self._series[answered_at] = (subject, answers)
        limit_s = self._connection.settings.request_within_s
        try:
            async with asyncio.timeout(limit_s):
                await self._connection.client.publish(
                    subject, msgspec.json.encode(body), reply=answered_at
                )
                return await _series(stream, answers)
        except TimeoutError as error:
            raise BusTimeoutError(f"no answer to {subject} within {limit_s:g} s") from error
        except nats_errors.Error as error:
            raise BusUnreachableError(f"cannot send {subject}: {error}") from error
        finally:
            del self._series[answered_at]

    async def api(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call JetStream's own API, for example `STREAM.INFO.FACTS`."""
        data = b"" if body is None else msgspec.json.encode(body)
        reply = await self.request(f"$JS.API.{verb}", data)
        if reply.headers and reply.headers.get("Status") == "503":
            raise JetStreamOffError(f"JetStream is not ready at {self._connection.settings.url}")
        try:
            answer = msgspec.json.decode(reply.data, type=dict[str, Any])
        except (msgspec.DecodeError, ValueError) as error:
            raise BusRefusedError(verb, 0, f"its answer cannot be read: {error}") from error
        if answer.get("error"):
            problem = msgspec.convert(answer["error"], Problem)
            raise _refusal(verb if len(verb.split(".")) < 3 else verb.split(".")[2], problem, verb)
        return answer

    async def on_reply(self, message: Msg) -> None:
        self._replied(message)

    def hear(self, subject: str, reply: str, data: bytes) -> None:
        """Take a reply without headers."""
        self._replied(Msg(self._connection.client, subject, reply, data))

    def _replied(self, message: Msg) -> None:
        if message.subject in self._series:
            self._series[message.subject][1].put_nowait(message)
            return
        waiting = self._waiting.get(message.subject)
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    def fail_all(self) -> None:
        """Fail all open requests: the connection was lost, and with it their answers."""
        url = self._connection.settings.url
        for subject, reply in self._waiting.values():
            _fail(reply, _broken(url, subject))
        for subject, answers in self._series.values():
            answers.put_nowait(_broken(url, subject))

    def fail_of_streams(self) -> None:
        """Fail what is not answered by a leader: a server has gone, perhaps that one."""
        for subject, reply in self._waiting.values():
            if subject.startswith(_OF_STREAMS):
                text = f"a server of the bus went before {subject} was answered"
                _fail(reply, BusUnreachableError(text))

    def fail_denied(self, denied: str) -> None:
        who = self._connection.login.name
        for subject, reply in self._waiting.values():
            if subject.lower() == denied:
                _fail(reply, BusDeniedError(f"user {who} may not publish to {subject}"))
        for subject, answers in self._series.values():
            if subject.lower() == denied:
                answers.put_nowait(BusDeniedError(f"user {who} may not publish to {subject}"))


async def _series(stream: str, answers: "asyncio.Queue[Msg | BusError]") -> StoredSeries:
    """The messages up to the one that ends the series."""
    read: list[Stored] = []
    while True:
        answer = await answers.get()
        if isinstance(answer, BusError):
            raise answer
        headers = answer.headers or {}
        status = headers.get("Status")
        if status == "204":
            return StoredSeries(read, int(headers.get("Nats-Num-Pending", 0)))
        if status == "404":
            return StoredSeries(read, 0)
        if status == "503":
            raise NoLeaderError(stream)
        if status is not None:
            why = headers.get("Description", "no reason given")
            raise BusRefusedError(stream, int(status), why)
        read.append(Stored.of(headers, answer.data))


def _refusal(stream: str, problem: Problem, verb: str = "") -> BusError:
    code = problem.err_code or problem.code
    if code == STREAM_NOT_FOUND:
        return NoStreamError(f"the stream {stream}")
    if code in NOT_AVAILABLE:
        return NoLeaderError(f"the stream {stream}")
    return BusRefusedError(verb or stream, code, problem.description or "no reason given")


def _headers(block: bytes) -> dict[str, str]:
    """The headers of a stored message; its first line is the protocol's version."""
    lines = block.decode(errors="replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name: value.strip() for name, _, value in pairs}


def _broken(url: str, subject: str) -> BusUnreachableError:
    return BusUnreachableError(f"the connection to {url} broke before {subject} was answered")


def _size_of(headers: Mapping[str, str] | None) -> int:
    """Bytes that the server counts besides the data: a first line, the headers, an empty line."""
    if not headers:
        return 0
    lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines


def _fail(reply: asyncio.Future[Msg], error: BusError) -> None:
    if not reply.done():
        reply.set_exception(error)


@asynccontextmanager
async def open_jetstream(connection: Connection) -> AsyncIterator[JetStream]:
    jetstream = JetStream(connection)
    with connection.noticing(
        down=jetstream.fail_all, denied=jetstream.fail_denied, fewer=jetstream.fail_of_streams
    ):
        replies = f"{jetstream.inbox}.*"
        async with connection.subscribed(replies, jetstream.on_reply, jetstream.hear):
            try:
                yield jetstream
            finally:
                await jetstream.close()


def nobody(service: str, verb: str) -> NobodyAnswersError:
    return NobodyAnswersError(f"nobody answers {service}.{verb}: is the {service} service running?")
