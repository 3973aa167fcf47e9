"""Questions and answers: typed, bounded, over `nats.micro`, so that NATS's tools see services."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service

from everstep import __version__, spans, subjects
from everstep.bus.background import in_background
from everstep.bus.connection import Connection
from everstep.bus.errors import AskRefusedError, AskTimeoutError, BusError, BusTimeoutError
from everstep.bus.input_failures import InputFailures
from everstep.bus.jetstream import JetStream, nobody
from everstep.bus.nats_patches import answer_at_once
from everstep.bus.ports import Handler, M
from everstep.errors import EverstepError
from everstep.messages import Message, tag_of
from everstep.messages.codec import BadMessageError, decode, encode
from everstep.messages.questions.asks import ASKS

log = logging.getLogger(__name__)

_OPEN_MOST = 16_384
"""Handlers may collect questions and decide about many at once; waiting handlers cost little."""
_ERROR = "Nats-Service-Error"
_CODE = "Nats-Service-Error-Code"
_MAX_REASON = 1024
_QUESTIONS = {(ask.service, ask.verb): ask.question for ask in ASKS}


class RefusalError(EverstepError):
    """Raise it in a handler to answer with this HTTP status and text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


async def ask(  # noqa: PLR0913  service, verb, question and limit are all needed
    jetstream: JetStream,
    service: str,
    verb: str,
    question: Message,
    of: type[M],
    *,
    job: str,
    within_s: float,
) -> M:
    """See `everstep.bus.ports.Bus.ask`."""
    subject = subjects.ask(service, verb, job)
    data, about = encode(question), {"everstep.job": job}
    try:
        with spans.span(f"ask {service}.{verb}", "client", about):
            reply = await jetstream.request(
                subject, data, headers=spans.headers(), within_s=within_s
            )
    except BusTimeoutError as error:
        raise AskTimeoutError(f"{service} did not answer {verb} within {within_s:g} s") from error
    headers = reply.headers or {}
    if headers.get("Status") == "503":
        raise nobody(service, verb)
    if _CODE in headers:
        raise AskRefusedError(service, verb, headers[_CODE], headers.get(_ERROR, ""))
    try:
        answer = decode(reply.data)
    except BadMessageError as error:
        raise AskRefusedError(
            service, verb, "502", f"its answer cannot be read: {error}"
        ) from error
    if not isinstance(answer, of):
        raise AskRefusedError(service, verb, "502", f"it answered with {type(answer).__name__}")
    return answer


class _Question(NamedTuple):
    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None = None


class _Answering:
    """One replica of one service: answers each question in a task of its own."""

    def __init__(self, connection: Connection, name: str, handlers: Mapping[str, Handler]) -> None:
        self._connection = connection
        self._name = name
        self._handlers = handlers
        self._tasks = asyncio.TaskGroup()
        self._open = 0
        self._service: Service | None = None
        self._input_failures = InputFailures(name)
        self._has_dropped = False

    async def answer_for_ever(self) -> None:
        async with self._tasks:
            await asyncio.Event().wait()

    async def attach(self, client: Client) -> None:
        self._service = await add_service(
            client, name=self._name, version=__version__, description=f"Everstep {self._name}"
        )
        for verb in self._handlers:
            subject = subjects.ask(self._name, verb, None)
            await self._service.add_endpoint(name=verb, subject=subject, handler=self._on_request)
            answer_at_once(client, self._service, self._hear)
            await self._connection.refuse_if_denied(client, subject)

    async def _on_request(self, request: Request) -> None:
        """Take a question with headers, which nats-py has queued."""
        reply = request._msg.reply  # noqa: SLF001  no public attribute has it
        self._take(_Question(request.subject, reply, request.data, request.headers))

    def _hear(self, subject: str, reply: str, data: bytes) -> None:
        self._take(_Question(subject, reply, data))

    def _take(self, question: _Question) -> None:
        if not question.reply:
            self._drop(question)
        elif self._open < 2 * _OPEN_MOST:  # else not even refusals leave this process
            self._open += 1
            self._tasks.create_task(self._answer(question))

    def _drop(self, question: _Question) -> None:
        """Ignore a question without a reply subject: nobody could receive the answer."""
        if not self._has_dropped:
            self._has_dropped = True
            log.warning("question_dropped subject=%s reason=it has no reply", question.subject)

    async def _answer(self, question: _Question) -> None:
        try:
            await self._connection.wait_opened()
            data, error = await self._answer_to(question)
            await self._connection.client.publish(question.reply, data, headers=error)
        except (nats_errors.Error, BusError) as lost:
            log.info("answer_lost subject=%s error=%s", question.subject, lost)
        except Exception as bug:  # noqa: BLE001  the replica answers all others
            self._input_failures.note(f"a question to {self._name}", bug)
        finally:
            self._open -= 1

    async def _answer_to(self, question: _Question) -> tuple[bytes, dict[str, str] | None]:
        """Return the answer and no headers, or those that tell an error."""
        if self._open > _OPEN_MOST:
            return _error("503", f"{self._name} has {_OPEN_MOST} questions waiting")
        verb, job = question.subject.split(".")[3], subjects.job_of(question.subject)
        try:
            message = _decoded(question.data, self._name, verb, job)
            parent = (question.headers or {}).get(spans.HEADER)
            about = {"everstep.job": job}
            with spans.span(f"{self._name}.{verb}", "server", about, parent=parent):
                return encode(await self._handlers[verb](message)), None
        except BadMessageError as error:
            return _error("400", str(error))
        except RefusalError as error:
            return _error(error.code, str(error))
        except EverstepError as error:
            return _error("422", str(error))
        except Exception as error:  # noqa: BLE001  one asker's question must not end the service
            self._input_failures.note(f"{verb} of {self._name}", error)
            return _error("500", f"{self._name} failed: see its log")

    async def stop(self) -> None:
        if self._service is not None:
            try:
                async with asyncio.timeout(2):
                    await self._service.stop()
            except (nats_errors.Error, TimeoutError) as error:
                log.debug("service_not_stopped error=%s", error)


def _decoded(data: bytes, service: str, verb: str, job: str) -> Message:
    message = decode(data)
    check_kind(service, verb, message)
    # The server allows this asker the job in the subject, and no other.
    if getattr(message, "job", None) != job:
        raise RefusalError("403", "the question is about another job than its subject")
    subjects.check_name(job)
    return message


def check_kind(service: str, verb: str, question: Message) -> None:
    """Raise `RefusalError` 400 unless the question has the verb's type."""
    wanted = _QUESTIONS.get((service, verb))
    if wanted is not None and not isinstance(question, wanted):
        text = f"{service}.{verb} takes {tag_of(wanted)}, not {tag_of(question)}"
        raise RefusalError("400", text)


def _error(code: str, text: str) -> tuple[bytes, dict[str, str]]:
    one_line = " ".join(text.split())[:_MAX_REASON]
    return b"", {_ERROR: one_line.encode("ascii", "replace").decode(), _CODE: code}


@asynccontextmanager
async def answering(
    jetstream: JetStream, service: str, handlers: Mapping[str, Handler]
) -> AsyncIterator[None]:
    """See `everstep.bus.ports.Bus.answer`."""
    replica = _Answering(jetstream.connection, service, handlers)
    async with in_background(replica.answer_for_ever()), jetstream.connection.attached(replica):
        try:
            yield
        finally:
            await replica.stop()
