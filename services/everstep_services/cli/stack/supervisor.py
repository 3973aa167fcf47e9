"""Start everything, say when it is ready, stop it together."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from socket import socket

from msgspec.structs import replace

from everstep import __version__
from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.background import in_background
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.bus.settings import RETENTION
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.observe.health import Check, Health
from everstep.observe.http import AsgiApp, observe_app, serve_asgi, url_of
from everstep.observe.metrics import MetricRegistry, measure_loop_lag
from everstep.observe.settings import ObserveSettings
from everstep.observe.traces import SpanExporter
from everstep.runtime import Loop, Parts, keep_what_is_loaded, serve
from everstep.settings import DEFAULT, Loaded
from everstep_services.agent.telemetry.leftover_spools import send_left_and_log
from everstep_services.cli.machine.bus_settings import server_version
from everstep_services.cli.machine.state import RunningServices, StateDir
from everstep_services.cli.stack.phases import Phases
from everstep_services.cli.stack.services import SERVICES, StackContext, imported
from everstep_services.history.notifications.documents import begin as begin_notices
from everstep_services.history.notifications.settings import NotifySettings
from everstep_services.logins.settings import LoginSettings

_READY_WITHIN_S = 60.0
_DRAIN_WITHIN_S = 10.0
TUNING = (
    "connect_within_s", "reconnect_wait_s", "reconnect_jitter_s", "ping_interval_s",
    "service_ping_interval_s",
    "request_within_s", "verify_every_s", "spool_max_bytes", *RETENTION,
)  # fmt: skip
"""Settings of [bus] that do not say where the bus is, and who logs in there."""


class NotReadyError(EverstepError):
    """The API does not answer although everything was started."""

    def __init__(self, url: str, within_s: float) -> None:
        super().__init__(f"{url} did not answer within {within_s:g} s of its start")


@dataclass(frozen=True, slots=True)
class Ready:
    """The announcement to people and other commands, once all services work."""

    running: RunningServices
    has_new_token: bool
    phases: Phases


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The folder, settings and listeners of `everstep up`, before anything runs."""

    state: StateDir
    settings: Loaded
    api: socket
    observe: socket
    phases: Phases
    command: str = "up"
    """Which command runs it: `up`, or `run` for the length of its job."""
    bus_host: str = "127.0.0.1"
    """Where the bus listens."""
    report_unsent: Callable[[str], None] | None = None
    """Reports messages to people that could not be sent, where all of this ends with a job."""


async def run_stack(
    ground: StackPlan,
    stop: asyncio.Event,
    tell: Callable[[Ready], None],
    when_open: Callable[[DevServer], None] = lambda _: None,
) -> None:
    """Run the bus, every service and the API until `stop`; `tell` is called when it is ready.

    `when_open` is called earlier: agents can join.
    """
    valid_s = ground.settings.section(LoginSettings).valid_s
    async with dev_server(ground.state.path, host=ground.bus_host, valid_s=valid_s) as server:
        ground.phases.end("nats-server")
        version = await set_up(
            server, ground.settings.section(BusSettings), ground.settings.section(NotifySettings)
        )
        ground.phases.end("streams")
        stack = _Stack(ground, server, version, tell, when_open)
        await serve(
            partial(measure_loop_lag, stack.metrics, SystemClock()),
            *_exporters(ground, stack.metrics),
            stop=stop,
            drains=(stack.open_services, stack.announce, stack.let_observe),
            drain_within_s=_DRAIN_WITHIN_S + 2,  # each service has its own, which ends before
        )


class _Stack:
    """The services on a bus that is there. One that fails takes all others with it."""

    def __init__(
        self,
        ground: StackPlan,
        server: DevServer,
        version: str,
        tell: Callable[[Ready], None],
        when_open: Callable[[DevServer], None],
    ) -> None:
        self._ground = ground
        self._server = server
        self._version = version
        self._tell = tell
        self._when_open = when_open
        self._had_token = ground.state.token_file.exists()
        self._opened: dict[str, Parts] = {}
        self._all_are_open = asyncio.Event()
        self.metrics = MetricRegistry("up")

    async def open_services(self, stop: asyncio.Event) -> None:
        """Open one by one. Each serves at once, while the next is still being imported."""
        ground = self._ground
        bus = tuned(self._server.settings(SERVICE), ground.settings)
        context = StackContext(ground.state, ground.settings, bus, ground.api, ground.report_unsent)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for name in SERVICES:
                service = await asyncio.to_thread(imported, name)
                parts = self._opened[name] = await stack.enter_async_context(service(context))
                tasks.create_task(_serve(parts, stop), name=name)
                ground.phases.end(name)
                if name == "rendezvous":
                    self._when_open(self._server)
            self._all_are_open.set()

    async def announce(self, stop: asyncio.Event) -> None:
        """Say where it is, once the API answers."""
        await self._all_are_open.wait()
        if stop.is_set():
            return
        ground = self._ground
        await _wait_ready(ground.api)
        ground.phases.end("api")
        keep_what_is_loaded()
        running = _running(ground, self._server, self._version, list(self._opened))
        await asyncio.to_thread(ground.state.announce, running)
        has_new_token = not self._had_token and ground.state.token_file.exists()
        await asyncio.to_thread(self._tell, Ready(running, has_new_token, ground.phases))
        async with in_background(send_left_and_log(ground.state.path / "spool")):
            await stop.wait()

    async def let_observe(self, stop: asyncio.Event) -> None:
        """Answer questions about the health of all services."""
        await self._all_are_open.wait()
        app = _observed(self._ground, self.metrics, self._opened)
        await serve_asgi(app, self._ground.observe, stop)


async def _serve(parts: Parts, stop: asyncio.Event) -> None:
    await serve(*parts.loops, stop=stop, drains=parts.drains, drain_within_s=_DRAIN_WITHIN_S)


def _observed(ground: StackPlan, metrics: MetricRegistry, opened: Mapping[str, Parts]) -> AsgiApp:
    checks: dict[str, Check] = {}
    for name, parts in opened.items():
        checks |= {f"{name}.{check}": ask for check, ask in parts.checks.items()}
        for component, statistics in parts.statistics.items():
            metrics.watch(component, statistics, of="" if component == name else name)
        metrics.collect(parts.collectors)
    within_s = ground.settings.section(ObserveSettings).check_within_s
    health = Health("up", __version__, checks, SystemClock(), within_s=within_s)
    return observe_app(health, metrics)


def _exporters(ground: StackPlan, metrics: MetricRegistry) -> tuple[Loop, ...]:
    """Send the spans of all services to the collector that a setting names."""
    url = ground.settings.section(ObserveSettings).traces_url
    if not url:
        return ()
    traces = SpanExporter(url, ground.command, SystemClock())
    metrics.watch("traces", traces.statistics)
    return (traces.export_for_ever,)


async def set_up(
    server: DevServer, settings: BusSettings, notify: NotifySettings | None = None
) -> str:
    """Make the streams, or correct them: with one server, each has one replica.

    A job may fail before history is open: from now on its messages are owed.
    """
    async with connect(server.settings(ADMIN), "up") as bus:
        await topology.init(bus.jetstream, retention=settings)
        if notify is not None and notify.is_on:
            await begin_notices(bus, SystemClock().wall().timestamp())
        return server_version(bus)


def tuned(login: BusSettings, settings: Loaded) -> BusSettings:
    """A login, with all of the settings of [bus] that do not say where the bus is."""
    section = settings.section(BusSettings)
    chosen = {
        name: getattr(section, name)
        for name in TUNING
        if settings.origins[f"bus.{name}"] != DEFAULT
    }
    return replace(login, **chosen)


def _running(
    ground: StackPlan, server: DevServer, version: str, names: list[str]
) -> RunningServices:
    return RunningServices(
        pid=os.getpid(),
        version=__version__,
        api=url_of(ground.api),
        observe=url_of(ground.observe),
        token_file=str(ground.state.token_file),
        bus=server.url,
        bus_version=version,
        bus_pid=server.pid,
        services=names,
        command=ground.command,
    )


async def _wait_ready(listener: socket) -> None:
    """Wait until the API answers a request: a socket that listens proves nothing."""
    host, port = listener.getsockname()[:2]
    try:
        async with asyncio.timeout(_READY_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await reader.readline()
            writer.close()
            await writer.wait_closed()
    except TimeoutError as error:
        raise NotReadyError(url_of(listener), _READY_WITHIN_S) from error
