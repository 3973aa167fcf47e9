"""Spans of a question over a real bus, received by a real OTLP receiver over HTTP."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from everstep import spans, subjects
from everstep.bus import connect
from everstep.bus.errors import AskRefusedError
from everstep.bus.requests import RefusalError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Done, Leave, Message, StandBy, StopJob
from everstep.observe.settings import ObserveSettings
from everstep.observe.traces import SpanExporter
from tests.fakes.clock import NotedClock
from tests.waiting import turns, until_async

CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"


class Receiver:
    """Takes OTLP at /v1/traces, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.services: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                receiver.take(self.path, json.loads(self.rfile.read(size)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def take(self, path: str, body: dict[str, Any]) -> None:
        assert path == "/v1/traces"
        for resource in body["resourceSpans"]:
            [name, _] = resource["resource"]["attributes"]
            self.services.add(name["value"]["stringValue"])
            for scope in resource["scopeSpans"]:
                self.spans += scope["spans"]

    def names(self) -> list[str]:
        return sorted(span["name"] for span in self.spans)

    def named(self, name: str) -> dict[str, Any] | None:
        return next((span for span in self.spans if span["name"] == name), None)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def answered(question: Message) -> Message:
    assert isinstance(question, StopJob)
    if question.reason == "no":
        raise RefusalError("409", "not now")
    return Done(text="stopped")


async def ask_twice(nats: DevServer, job: str) -> None:
    """As a request to REST does: a question that is answered, and one that is refused."""
    settings = nats.settings("service")
    async with (
        connect(settings, "one") as asker,
        connect(settings, "other") as service,
        service.answer("rendezvous", {"stop": answered}),
    ):
        with spans.span("GET /api/v1", "server", {"url.path": "/x"}, parent=CLIENT):
            yes = StopJob(job=job, by="ada", reason="yes")
            await asker.ask("rendezvous", "stop", yes, Done, job=job, within_s=30)
            with pytest.raises(AskRefusedError):
                no = StopJob(job=job, by="ada", reason="no")
                await asker.ask("rendezvous", "stop", no, Done, job=job, within_s=30)


async def test_the_context_of_a_request_travels_through_the_bus(
    shared_nats: DevServer, receiver: Receiver, job: str
) -> None:
    exporter = SpanExporter(receiver.url, "test", NotedClock(most_s=0.01))
    exporting = asyncio.create_task(exporter.export_for_ever())
    await turns()
    await ask_twice(shared_nats, job)
    await until_async(lambda: receiver.named("GET /api/v1"), "the spans have arrived")
    exporting.cancel()
    await asyncio.wait([exporting])
    names = ("GET /api/v1", "ask rendezvous.stop", "rendezvous.stop")
    request, asked, answer = (receiver.named(name) or {} for name in names)
    assert {span["traceId"] for span in receiver.spans} == {"a" * 32}
    assert request["parentSpanId"] == "b" * 16
    assert asked["parentSpanId"] == request["spanId"]
    assert answer["parentSpanId"] == asked["spanId"]
    assert (asked["kind"], answer["kind"]) == (3, 2)
    assert answer["attributes"] == [{"key": "everstep.job", "value": {"stringValue": job}}]
    assert int(answer["startTimeUnixNano"]) <= int(answer["endTimeUnixNano"])
    refused = [span for span in receiver.spans if span["status"]]
    assert [span["status"]["message"] for span in refused] == ["RefusalError: not now"]
    assert receiver.services == {"everstep-test"}


SPANS_OF_TWO_ORDERS = [
    *("ask rendezvous.leave", "deliver stand_by.v1", "order", "receive order", "receive order"),
    "rendezvous.leave",
]


async def test_an_order_carries_the_context_back(
    shared_nats: DevServer, receiver: Receiver, job: str
) -> None:
    """From the agent's question to the service, and from there to the agent."""
    agent_login = await shared_nats.grant(job)
    exporter = SpanExporter(receiver.url, "test", NotedClock(most_s=0.01))
    exporting = asyncio.create_task(exporter.export_for_ever())
    await turns()
    settings, order = (
        shared_nats.settings("service"),
        StandBy(id="a" * 32, job=job, round=1, reason="yes"),
    )
    async with (
        connect(agent_login, "agent") as agent,
        connect(settings, "other") as service,
        agent.subscribe(subjects.order(job), Message) as orders,
    ):

        async def sends(_question: Message) -> Message:
            with spans.span("order", "client", {}):
                service.send(subjects.order(job), order)
            return Done(text="stopped")

        async with service.answer("rendezvous", {"leave": sends}):
            leave = Leave(job=job, node="n1", instance="i1", round=1, cause="done", reason="asked")
            await agent.ask("rendezvous", "leave", leave, Done, job=job, within_s=30)
            assert await orders.get() == order
        assert await service.deliver(subjects.order(job), order, within_s=30)
        await until_async(receiver.names, "spans", holds=lambda seen: seen == SPANS_OF_TWO_ORDERS)
    exporting.cancel()
    await asyncio.wait([exporting])
    asked, answer, sent = (
        receiver.named(name) or {} for name in ("ask rendezvous.leave", "rendezvous.leave", "order")
    )
    received = [span for span in receiver.spans if span["name"] == "receive order"]
    assert answer["parentSpanId"] == asked["spanId"]
    assert sent["parentSpanId"] == answer["spanId"]
    assert received[0]["parentSpanId"] == sent["spanId"]
    assert {span["traceId"] for span in (asked, answer, sent, received[0])} == {asked["traceId"]}
    delivered = receiver.named("deliver stand_by.v1") or {}
    assert received[1]["parentSpanId"] == delivered["spanId"]


async def test_a_collector_that_is_away_costs_spans_only(receiver: Receiver) -> None:
    exporter = SpanExporter("http://127.0.0.1:1/v1/traces", "test", NotedClock(most_s=0.01))
    exporting = asyncio.create_task(exporter.export_for_ever())
    await turns()
    with spans.span("one", "server", {}):
        pass
    await until_async(
        exporter.statistics, "it is dropped", holds=lambda counts: counts["dropped_total"] == 1
    )
    exporting.cancel()
    await asyncio.wait([exporting])
    assert receiver.spans == []


def test_without_a_collector_there_is_no_span_and_no_header() -> None:
    with spans.span("one", "server", {}, parent=CLIENT):
        assert spans.headers() == {}


@pytest.mark.parametrize("parent", ["", "00-x-y-01", "00-" + "a" * 32, CLIENT.upper()])
def test_a_context_that_is_none_begins_a_new_trace(parent: str) -> None:
    ended: list[spans.Span] = []
    with spans.collected_by(ended.append), spans.span("one", "server", {}, parent=parent):
        assert spans.headers()
    assert ended[0].parent_id == ""
    assert ended[0].trace_id != "a" * 32


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="traces_url must begin with http"):
        ObserveSettings(traces_url="collector:4318")
