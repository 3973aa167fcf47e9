"""What a process tells about itself, and what it must never tell."""

import asyncio
import io
import json
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import __version__
from everstep.errors import EverstepError
from everstep.observe.health import Check, Health
from everstep.observe.http import (
    AsgiApp,
    ListenError,
    Receive,
    Scope,
    Send,
    listen,
    observe_app,
    serve_asgi,
    url_of,
)
from everstep.observe.logs import ConsoleFormatter, JsonFormatter, configure
from everstep.observe.metrics import Metrics, measure_loop_lag
from everstep.observe.redaction import redact, register_secret
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import serve

log = logging.getLogger("everstep_services.health.service")
patient = settings(deadline=None)  # no promise about speed is made here


class HandClock:
    """A clock that a test moves; sleeping takes as long as it was told to be late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.time = 100.0
        self.late_s = late_s
        self.third_sleep = asyncio.Event()
        self._sleeps = 0

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        if self._sleeps == 3:
            self.third_sleep.set()
        self.time += seconds + self.late_s
        await asyncio.sleep(0)


# -- logs ----------------------------------------------------------------------------------


def as_json(message: object, *args: object, name: str = log.name, **rest: Any) -> dict[str, Any]:
    record = logging.LogRecord(name, logging.INFO, __file__, 1, message, args, None, **rest)
    line = JsonFormatter("history").format(record)
    assert "\n" not in line
    decoded: dict[str, Any] = json.loads(line)
    return decoded


def test_json_recovers_the_keys_and_keeps_the_types() -> None:
    line = as_json("round_formed round=%d nodes=%d waited_s=%.1f ok=%s", 3, 4, 1.25, True)
    assert {key: value for key, value in line.items() if key != "at"} == {
        "level": "info",
        "service": "health",
        "event": "round_formed",
        "round": 3,
        "nodes": 4,
        "waited_s": 1.25,
        "ok": True,
    }
    at = datetime.fromisoformat(line["at"])
    assert at.tzinfo is not None
    assert line["at"].endswith("Z")


@pytest.mark.parametrize(
    ("template", "args", "expected"),
    [
        ("stopped", (), {"event": "stopped"}),
        ("stream_%s name=%s", ("made", "FACTS"), {"event": "stream_made", "name": "FACTS"}),
        ("stream_%s name=%s", ("A b", "F"), {"event": "log", "text": "stream_A b name=F"}),
        ("ended reason=%r", ("silent for 6 s",), {"event": "ended", "reason": "silent for 6 s"}),
        ("sent to=%s bytes=%5d", ("a", 7), {"event": "sent", "to": "a", "bytes": 7}),
        ("sent to=%s", (None,), {"event": "sent", "to": None}),
        ("sent kind=fact to=%s", ("a",), {"event": "sent", "kind": "fact", "to": "a"}),
        ("sent to=%s", ({"a": 1},), {"event": "log", "text": "sent to=a"}),
        ("sent level=%s", ("high",), {"event": "sent", "level_": "high"}),
        ("Waiting for %s to close", ("x",), {"event": "log", "text": "Waiting for x to close"}),
        ("used disk=%d%%", (9,), {"event": "log", "text": "used disk=9%"}),
        ("used disk=%(d)s", ({"d": 9},), {"event": "log", "text": "used disk=9"}),
        ("sent to=%s", ("a", "b"), {"event": "log", "text": "sent to=%s ('a', 'b')"}),
        ("sent to=%s by=%s", ("a",), {"event": "log", "text": "sent to=%s by=%s ('a',)"}),
        ("sent to=%d", ("a",), {"event": "sent", "to": "a"}),
        ("sent to=%s", (b"\xff",), {"event": "sent", "to": "b'\\xff'"}),
        ("sent ratio=%g", (float("nan"),), {"event": "sent", "ratio": None}),
    ],
)
def test_templates(template: str, args: tuple[object, ...], expected: dict[str, object]) -> None:
    if args == ({"a": 1},):
        template, expected = "sent to=%(a)s", {"event": "log", "text": "sent to=1"}
    line = as_json(template, *args)
    assert {k: v for k, v in line.items() if k not in {"at", "level", "service"}} == expected


@patient
@given(st.text(), st.lists(st.none() | st.integers() | st.text() | st.binary() | st.floats()))
def test_any_record_is_one_valid_line(template: str, args: list[object]) -> None:
    assert as_json(template, *args)["service"] == "health"


def test_a_record_of_a_library_belongs_to_the_process() -> None:
    assert as_json("hello", name="uvicorn.error")["service"] == "history"


def test_an_exception_is_one_field() -> None:
    error = KeyError("evs_verysecrettoken")
    record = logging.LogRecord(
        log.name, logging.ERROR, __file__, 1, "died", (), (KeyError, error, None)
    )
    line = json.loads(JsonFormatter("history").format(record))
    assert line["exception"].splitlines()[-1] == "KeyError: 'evs_***'"


def test_a_long_value_is_cut() -> None:
    assert len(as_json("said text=%s", "x" * 100_000)["text_"]) < 10_000


def test_the_console_is_aligned_and_obeys_nobody() -> None:
    record = logging.LogRecord(
        log.name, logging.WARNING, __file__, 1, "said to=%s", ("a\n\x1b[31mred",), None
    )
    plain = ConsoleFormatter("history", color=False).format(record)
    assert plain[12:] == "  warning  health      said                   to=a\\n\\x1b[31mred"
    assert "\x1b[33mwarning\x1b[0m" in ConsoleFormatter("history", color=True).format(record)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logging_restored() -> Generator[None, None, None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(
    ("stream", "environ", "form", "is_json", "has_color"),
    [
        (io.StringIO, {}, "auto", True, False),
        (Terminal, {}, "auto", False, True),
        (Terminal, {"NO_COLOR": "1"}, "auto", False, False),
        (Terminal, {"NO_COLOR": ""}, "auto", False, True),
        (Terminal, {}, "json", True, False),
        (io.StringIO, {}, "console", False, False),
    ],
)
def test_the_form_follows_the_stream(
    stream: Callable[[], io.StringIO],
    environ: dict[str, str],
    form: Any,
    is_json: bool,
    has_color: bool,
) -> None:
    written = stream()
    configure(LogSettings(format=form), "health", environ=environ, stream=written)
    log.warning("bus_lost after_s=%d", 3)
    log.debug("unseen")
    (line,) = written.getvalue().splitlines()
    assert line.startswith("{") is is_json
    assert ("\x1b[" in line) is has_color


# -- secrets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("token evs_Ab12-_Cd34 used", "token evs_*** used"),
        ("nats://me:hunter22@host:4222", "nats://me:***@host:4222"),
        ("postgresql+asyncpg://u:p%40ss@h/db", "postgresql+asyncpg://u:***@h/db"),
        ("Authorization: Bearer abcdefgh123", "Authorization: Bearer ***"),
        ("http://127.0.0.1:7070/a@b", "http://127.0.0.1:7070/a@b"),
        ("user@host: nothing", "user@host: nothing"),
    ],
)
def test_secrets_are_known_by_their_form(text: str, safe: str) -> None:
    assert redact(text) == safe


@patient
@given(st.text(min_size=6, max_size=40), st.text(), st.text())
def test_a_registered_secret_is_in_no_log_line(secret: str, before: str, after: str) -> None:
    secret = f"<{secret}>"
    register_secret(secret)
    record = logging.LogRecord(
        log.name,
        logging.INFO,
        __file__,
        1,
        "said a=%s b=%r",
        (before + secret + after, secret),
        None,
    )
    for formatter in (JsonFormatter("x"), ConsoleFormatter("x", color=False)):
        assert secret not in formatter.format(record)


def test_a_short_value_is_not_registered() -> None:
    register_secret("a")
    assert redact("banana") == "banana"


# -- metrics -------------------------------------------------------------------------------


async def test_metrics_name_the_build_and_what_components_count() -> None:
    metrics = Metrics("history")
    counted = {"sent_total": 3.0, "waiting": 2, "Bad-Name": 1}
    metrics.watch("bus", lambda: counted)
    text = (await metrics.exposition()).decode()
    assert f'everstep_build_info{{service="history",version="{__version__}"}} 1.0' in text
    assert "everstep_bus_sent_total 3.0" in text
    assert "everstep_bus_waiting 2.0" in text
    assert "Bad" not in text
    assert "process_open_fds" in text
    counted["sent_total"] = 4
    assert "everstep_bus_sent_total 4.0" in (await metrics.exposition()).decode()


async def test_a_blocked_loop_shows_in_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    metrics, clock = Metrics("history"), HandClock(late_s=2.5)
    async with asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(measure_loop_lag(metrics, clock, every_s=0.5))
        await clock.third_sleep.wait()
        measuring.cancel()
    text = (await metrics.exposition()).decode()
    assert "everstep_loop_lag_seconds 2.5" in text
    assert 'everstep_loop_lag_distribution_seconds_bucket{le="1.0"} 0.0' in text
    assert "loop_blocked lag_s=2.50 limit_s=1.00" in caplog.messages


# -- health --------------------------------------------------------------------------------


async def fine() -> None:
    return


async def broken() -> None:
    raise EverstepError("no server at\nnats://u:hunter22@h:1")


async def buggy() -> None:
    raise KeyError("/var/lib/private")


async def hanging() -> None:
    await asyncio.Event().wait()


def health_of(clock: HandClock, within_s: float = 2.0, **checks: Check) -> Health:
    return Health("history", "1.2.3", checks, clock, within_s=within_s)


async def test_each_check_says_what_is_wrong_and_nothing_more() -> None:
    health = health_of(HandClock(), 0.01, a=fine, b=broken, c=buggy, d=hanging)
    report = await health.report()
    assert report.status == "failing"
    assert {name: (check.ok, check.reason) for name, check in report.checks.items()} == {
        "a": (True, ""),
        "b": (False, "no server at nats://u:***@h:1"),
        "c": (False, "the check itself failed; see the log of this process"),
        "d": (False, "no answer within 0.01 s"),
    }


async def test_a_thousand_askers_are_one_question_a_second() -> None:
    clock, asked = HandClock(), list[float]()

    async def counted() -> None:
        asked.append(clock.now())
        await asyncio.sleep(0)

    health = health_of(clock, bus=counted)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(1000):
            tasks.create_task(health.report())
    assert asked == [100.0]
    clock.time += 0.99
    await health.report()
    assert asked == [100.0]
    clock.time += 0.01
    await health.report()
    assert asked == [100.0, 101.0]


# -- HTTP ----------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0, remedy="wait") as listener:
        yield listener


@asynccontextmanager
async def served(app: AsgiApp, drain_within_s: float = 3.0):  # type: ignore[no-untyped-def]
    stop = asyncio.Event()
    with listening() as listener:
        url = url_of(listener)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_asgi(app, listener, stop, drain_within_s=drain_within_s))
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                yield client, stop
            stop.set()


async def test_the_three_pages_and_nothing_else() -> None:
    app = observe_app(health_of(HandClock(), bus=fine), Metrics("history"))
    async with served(app) as (client, _):
        healthy = await client.get("/healthz")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
        assert healthy.json()["checks"]["bus"] == {"ok": True, "reason": "", "took_ms": 0.0}
        assert healthy.json()["version"] == "1.2.3"
        assert "server" not in healthy.headers
        alive = await client.get("/livez")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "everstep_build_info" in metrics.text
        for path in ("/", "/healthz/", "/docs", "/../etc/passwd", "/metrics?x=1/../y"):
            expected = 200 if path.startswith("/metrics") else 404
            assert (await client.get(path)).status_code == expected
        assert (await client.post("/healthz")).status_code == 405
        head = await client.head("/livez")
        assert (head.status_code, head.text) == (200, "")


async def test_a_failing_check_is_503_with_the_reason() -> None:
    app = observe_app(health_of(HandClock(), bus=broken, disk=buggy), Metrics("history"))
    async with served(app) as (client, _):
        answer = await client.get("/healthz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["bus"]["reason"] == "no server at nats://u:***@h:1"
        assert "private" not in answer.text
        assert (await client.get("/livez")).status_code == 200


async def test_it_stops_within_its_bound_with_open_connections() -> None:
    ended = list[str]()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stream")

    async with served(stream, drain_within_s=0.05) as (client, stop):
        host, port = client.base_url.host, client.base_url.port
        _, idle = await asyncio.open_connection(host, port)
        async with client.stream("GET", "/") as response:
            chunks = response.aiter_bytes()
            assert await anext(chunks) == b"x"
            stop.set()
            with pytest.raises(httpx2.HTTPError):  # cut off, not ended
                await anext(chunks)
        idle.close()
        await idle.wait_closed()
    assert ended == ["stream"]


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    full = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            full.set()
            body = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
            await send(body)

    stop = asyncio.Event()
    with listening() as listener:
        host, port = listener.getsockname()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_asgi(flood, listener, stop, drain_within_s=0.05))
            before = open_files()
            with socket.create_connection((host, port)) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await full.wait()
                stop.set()
                await serving
                await asyncio.sleep(0)
                assert open_files() == before  # the listener is closed, the client's is open


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_it_leaves_no_task_and_no_port_when_a_neighbour_fails() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    async def failing() -> None:
        await asyncio.sleep(0)
        raise EverstepError("neighbour")

    with listening() as listener:
        host, port = listener.getsockname()
        with pytest.raises(ExceptionGroup):
            await serve(failing, stop=asyncio.Event(), drains=[partial(serve_asgi, app, listener)])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with listen(host, port, remedy="wait"):
        pass


def test_a_taken_port_is_one_clear_line() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError) as caught:
            listen("127.0.0.1", port, remedy="choose another with --api-port")
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: something else listens there already; "
        f"choose another with --api-port"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 70000}, "port must be from 0 to 65535, got 70000"),
        ({"check_within_s": 0.0}, "check_within_s must be above 0, got 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ObserveSettings(**settings)
