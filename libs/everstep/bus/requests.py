"""Questions and answers: typed, bounded, over `nats.micro`, so that NATS's tools see services."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import Service

from everstep import __version__, spans, subjects
from everstep.bus.background import in_background
from everstep.bus.connection import Connection
from everstep.bus.errors import (
    AskRefusedError,
    AskTimeoutError,
    BusTimeoutError,
)
from everstep.bus.input_failures import InputFailures
from everstep.bus.jetstream import JetStream, nobody
from everstep.bus.ports import Handler, M
from everstep.errors import EverstepError
from everstep.messages import Message, tag_of
from everstep.messages.codec import BadMessageError, decode, encode
from everstep.messages.questions.asks import ASKS

log = logging.getLogger(__name__)

_QUEUE = 16_384
_WORKERS = 1024
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


class _Answering:
    """One replica of one service: receives and enqueues questions; worker tasks answer them."""

    def __init__(self, connection: Connection, name: str, handlers: Mapping[str, Handler]) -> None:
        self._connection = connection
        self._name = name
        self._handlers = handlers
        self._questions: asyncio.Queue[tuple[str, Request]] = asyncio.Queue(_QUEUE)
        self._service: Service | None = None
        self._input_failures = InputFailures(name)
        self._has_dropped = False

    async def attach(self, client: Client) -> None:
        self._service = await add_service(
            client, name=self._name, version=__version__, description=f"Everstep {self._name}"
        )
        for verb in self._handlers:
            subject = subjects.ask(self._name, verb, None)
            await self._service.add_endpoint(name=verb, subject=subject, handler=self._enqueue)
            await self._connection.refuse_if_denied(client, subject)

    async def _enqueue(self, request: Request) -> None:
        # nats-py answers with the error raised here; if that fails, it ends the subscription.
        with self._input_failures.caught("a question"):
            if not _reply_subject(request):
                self._drop(request)
                return
            try:
                self._questions.put_nowait((request.subject.split(".")[3], request))
            except asyncio.QueueFull:
                await _refuse(request, "503", f"{self._name} has {_QUEUE} questions waiting")

    def _drop(self, request: Request) -> None:
        """Ignore a question without a reply subject: nobody could receive the answer."""
        if not self._has_dropped:
            self._has_dropped = True
            log.warning("question_dropped subject=%s reason=it has no reply", request.subject)

    async def work_for_ever(self) -> None:
        while True:
            verb, request = await self._questions.get()
            with self._input_failures.caught(f"{verb} of {self._name}"):
                try:
                    await self._answer(verb, request)
                except nats_errors.Error as error:
                    log.info("answer_lost service=%s verb=%s error=%s", self._name, verb, error)

    async def _answer(self, verb: str, request: Request) -> None:
        try:
            question = _question(request, self._name, verb)
            about = {"everstep.job": subjects.job_of(request.subject)}
            parent = (request.headers or {}).get(spans.HEADER)
            with spans.span(f"{self._name}.{verb}", "server", about, parent=parent):
                reply = encode(await self._handlers[verb](question))
        except BadMessageError as error:
            await _refuse(request, "400", str(error))
        except RefusalError as error:
            await _refuse(request, error.code, str(error))
        except EverstepError as error:
            await _refuse(request, "422", str(error))
        except Exception as error:  # noqa: BLE001  one asker's question must not end the service
            self._input_failures.note(f"{verb} of {self._name}", error)
            await _refuse(request, "500", f"{self._name} failed: see its log")
        else:
            await request.respond(reply)

    async def stop(self) -> None:
        if self._service is not None:
            try:
                async with asyncio.timeout(2):
                    await self._service.stop()
            except (nats_errors.Error, TimeoutError) as error:
                log.debug("service_not_stopped error=%s", error)


def _reply_subject(request: Request) -> str:
    return str(request._msg.reply or "")  # noqa: SLF001  no public attribute has it


def _question(request: Request, service: str, verb: str) -> Message:
    question = decode(request.data)
    check_kind(service, verb, question)
    # The server allows this asker the job in the subject, and no other.
    if getattr(question, "job", None) != subjects.job_of(request.subject):
        raise RefusalError("403", "the question is about another job than its subject")
    subjects.check_name(subjects.job_of(request.subject))
    return question


def check_kind(service: str, verb: str, question: Message) -> None:
    """Raise `RefusalError` 400 unless the question has the verb's type."""
    wanted = _QUESTIONS.get((service, verb))
    if wanted is not None and not isinstance(question, wanted):
        text = f"{service}.{verb} takes {tag_of(wanted)}, not {tag_of(question)}"
        raise RefusalError("400", text)


async def _refuse(request: Request, code: str, text: str) -> None:
    one_line = " ".join(text.split())[:_MAX_REASON]
    await request.respond_error(code, one_line.encode("ascii", "replace").decode())


@asynccontextmanager
async def answering(
    jetstream: JetStream, service: str, handlers: Mapping[str, Handler]
) -> AsyncIterator[None]:
    """See `everstep.bus.ports.Bus.answer`."""
    replica = _Answering(jetstream.connection, service, handlers)
    workers = [replica.work_for_ever() for _ in range(_WORKERS)]
    async with in_background(*workers), jetstream.connection.attached(replica):
        try:
            yield
        finally:
            await replica.stop()
