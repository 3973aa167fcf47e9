"""The client of the API: every failure is one line and its exit code; following never gives up."""

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial

import click
import httpx2
import pytest

from everstep_services.cli.api.client import MAX_ANSWER_BYTES, Api, follow
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.times import MomentParameter, SpanParameter

URL = "http://api.test:1"
Answer = Callable[[httpx2.Request], httpx2.Response]


def api(answer: Answer, token: str | None = "evs_x") -> Api:
    return Api(URL, token, timeout_s=5, transport=httpx2.MockTransport(answer))


def answer_with(response: httpx2.Response, request: httpx2.Request) -> httpx2.Response:
    del request
    return response


def problem(status: int, **body: object) -> Answer:
    content = json.dumps(body).encode()
    return lambda _: httpx2.Response(
        status, content=content, headers={"Content-Type": "application/problem+json"}
    )


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (400, {"detail": "bad\ncursor"}, Exit.USAGE, "bad cursor"),
        (401, {"detail": "no token"}, Exit.FORBIDDEN,
         "no token; name a file with a valid token: --token-file FILE, or make one where the "
         "database of history is: everstep token create NAME --scope admin --database URL"),
        (403, {"detail": "needs admin"}, Exit.FORBIDDEN, "needs admin"),
        (404, {"title": "Not Found"}, Exit.NOT_FOUND, "Not Found"),
        (422, {"detail": "query.limit: too large"}, Exit.USAGE, "query.limit: too large"),
        (429, {"detail": "wait 3 s"}, Exit.ERROR, "wait 3 s"),
        (500, {}, Exit.ERROR, "the API answered with status 500"),
        (503, {"detail": "too busy"}, Exit.UNREACHABLE, "too busy"),
        (500, {"detail": 7}, Exit.ERROR, "the API answered with status 500"),
    ],
)  # fmt: skip
def test_a_problem_is_one_line_and_a_code(
    status: int, body: dict[str, object], code: Exit, said: str
) -> None:
    with api(problem(status, **body)) as client, pytest.raises(CliError) as caught:
        client.get("jobs")
    assert (caught.value.code, str(caught.value)) == (code, said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx2.ConnectError("refused"), "cannot be reached: refused"),
        (httpx2.ConnectTimeout(""), "did not answer within 5 s"),
        (httpx2.ReadTimeout(""), "did not answer within 5 s"),
        (httpx2.RemoteProtocolError("half"), "broke off: half"),
        (httpx2.ReadError(""), "broke off: ReadError"),
    ],
)
def test_an_api_that_is_away_is_unreachable(error: Exception, said: str) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise error

    with api(answer) as client, pytest.raises(CliError) as caught:
        client.get("jobs")
    assert caught.value.code is Exit.UNREACHABLE
    assert str(caught.value) == (f"the API at {URL} {said}; is it running? See everstep doctor")


def test_an_answer_that_is_no_json_or_has_no_end_is_refused() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * (1 << 20)

    page, flood = httpx2.Response(200, content=b"<html>"), httpx2.Response(200, content=endless())
    for response, said in ((page, "did not answer in JSON"), (flood, "more than 64 MiB")):
        with api(partial(answer_with, response)) as client, pytest.raises(CliError, match=said):
            client.get("jobs")
    assert MAX_ANSWER_BYTES == 64 << 20


def test_what_is_sent() -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(201, content=b'{"id":"x"}')

    with api(answer) as client:
        assert client.post("tokens", {"name": "n"}) == {"id": "x"}
        client.get("facts", {"kind": ["a", "b"], "job": None, "limit": 5})
        client.delete("tokens", "a/../b")
    assert [(r.method, str(r.url)) for r in seen] == [
        ("POST", f"{URL}/api/v1/tokens"),
        ("GET", f"{URL}/api/v1/facts?kind=a&kind=b&limit=5"),
        ("DELETE", f"{URL}/api/v1/tokens/a%2F..%2Fb"),
    ]
    assert {r.headers["Authorization"] for r in seen} == {"Bearer evs_x"}
    assert json.loads(seen[0].read()) == {"name": "n"}


def test_pages_are_fetched_only_as_far_as_needed() -> None:
    asked: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        cursor = request.url.params.get("cursor")
        asked.append(cursor)
        page = int(cursor or 0)
        items = [{"n": 2 * page}, {"n": 2 * page + 1}]
        next_ = str(page + 1) if page < 2 else None
        return httpx2.Response(200, content=json.dumps({"items": items, "next": next_}).encode())

    with api(answer) as client:
        assert [item["n"] for item in client.pages("facts", {}, most=None)] == list(range(6))
        assert asked == [None, "1", "2"]
        asked.clear()
        assert [item["n"] for item in client.pages("facts", {}, most=2)] == [0, 1]
        assert asked == [None]


# -- following -----------------------------------------------------------------------------


def events(*chunks: bytes, then: Exception | None = None) -> Iterable[bytes]:
    yield from chunks
    if then is not None:
        raise then


class Stream:
    """An API whose stream answers one connection after the other as told."""

    def __init__(self, *connections: Callable[[], httpx2.Response]) -> None:
        self.connections = list(connections)
        self.last_ids: list[str | None] = []
        self.slept: list[float] = []
        self.said: list[str] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.last_ids.append(request.headers.get("Last-Event-ID"))
        return self.connections.pop(0)()

    def follow(self) -> Iterator[httpx2.ServerSentEvent]:
        with api(self) as client:
            yield from follow(
                client, "facts/stream", {}, say=self.said.append, sleep=self.slept.append
            )


def streamed(*chunks: bytes, then: Exception | None = None) -> Callable[[], httpx2.Response]:
    return lambda: httpx2.Response(
        200, content=events(*chunks, then=then), headers={"Content-Type": "text/event-stream"}
    )


def refused(status: int) -> Callable[[], httpx2.Response]:
    return lambda: httpx2.Response(status, content=b'{"detail":"no"}')


def unreachable() -> httpx2.Response:
    raise httpx2.ConnectError("refused")


def test_a_lost_stream_goes_on_after_the_last_event() -> None:
    stream = Stream(
        streamed(b"event: fact\nid: e-1\ndata: 1\n\n", then=httpx2.ReadError("cut")),
        unreachable,
        refused(503),
        streamed(b"id: e-5\n: alive\n\n", b"event: fact\nid: e-6\ndata: 6\n\n"),
        streamed(b"event: fact\ndata: 7\n\n", b"event: fact\nid: e-8\ndata: 8"),
        refused(401),
    )
    seen: list[str] = []
    with pytest.raises(CliError) as caught:
        seen.extend(event.data for event in stream.follow() if event.event == "fact")
    assert seen == ["1", "6", "7"]
    assert caught.value.code is Exit.FORBIDDEN
    assert stream.last_ids == [None, "e-1", "e-1", "e-1", "e-6", "e-6"]
    assert len(stream.said) == 3
    assert all(0 < wait_s <= 10 for wait_s in stream.slept)


def test_events_arrive_in_order_and_once() -> None:
    stream = Stream(
        streamed(b"event: fact\nid: e-1\ndata: 1\n\nevent: fact\nid: e-2\nda", b"ta: 2\n\n"),
        streamed(b"event: fact\nid: e-3\ndata: 3\n\n"),
    )
    following = stream.follow()
    assert [next(following).data for _ in range(3)] == ["1", "2", "3"]


def test_only_the_first_connection_may_be_unreachable() -> None:
    for first, code in ((unreachable, Exit.UNREACHABLE), (refused(404), Exit.NOT_FOUND)):
        with pytest.raises(CliError) as caught:
            next(Stream(first).follow())
        assert caught.value.code is code


# -- times ---------------------------------------------------------------------------------


def test_spans_and_moments() -> None:
    assert [
        SpanParameter().convert(text, None, None) for text in ("90s", "10m", "2h", "7d", "1w")
    ] == [90, 600, 7200, 604800, 604800]
    at = MomentParameter().convert("2026-11-21T09:00:00+01:00", None, None)
    assert at == datetime(2026, 11, 21, 8, tzinfo=UTC)
    before = datetime.now(UTC)
    moment = MomentParameter().convert("10m", None, None)
    assert before <= moment + timedelta(minutes=10) <= datetime.now(UTC)


@pytest.mark.parametrize(
    "text", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "999999999w", "2026-13-01"]
)
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a moment"):
        MomentParameter().convert(text, None, None)


@pytest.mark.parametrize("text", ["", "10", "0s", "m", "1y", "-5m", "9" * 12 + "s"])
def test_what_is_no_span(text: str) -> None:
    for kind in (SpanParameter(), MomentParameter()):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


def test_a_list_that_was_cut_says_how_many_and_one_that_was_not_says_nothing() -> None:
    pages = {None: {"items": [1, 2], "next": "c"}, "c": {"items": [3], "next": None}}

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=pages[request.url.params.get("cursor")])

    for most, cut in {1: [1], 2: [2], 3: [], 4: [], None: []}.items():
        told: list[int] = []
        with api(answer) as client:
            found: list[object] = list(client.pages("jobs", {}, most=most, when_cut=told.append))
        assert (found, told) == ([1, 2, 3][:most], cut)
