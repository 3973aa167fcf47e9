"""Start everything, say when it is ready, stop it together."""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from socket import socket

from everstep import __version__
from everstep.bus import connect, topology
from everstep.bus.devserver import DevServer, dev_server
from everstep.bus.roles import ADMIN, SERVICE
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.observe.health import Check, Health
from everstep.observe.http import observe_app, serve_asgi, url_of
from everstep.observe.metrics import Metrics, measure_loop_lag
from everstep.observe.settings import ObserveSettings
from everstep.runtime import Drain, Parts, serve
from everstep.settings import Loaded
from everstep_services.cli.buses import server_version
from everstep_services.cli.stack.phases import Phases
from everstep_services.cli.stack.services import Surroundings, services
from everstep_services.cli.state import Running, StateDir

_READY_WITHIN_S = 30.0
_DRAIN_WITHIN_S = 10.0


class NotReadyError(EverstepError):
    """The API does not answer although everything was started."""

    def __init__(self, url: str, within_s: float) -> None:
        super().__init__(f"{url} did not answer within {within_s:g} s of its start")


@dataclass(frozen=True, slots=True)
class Ready:
    """What is told once all of it works."""

    running: Running
    has_new_token: bool
    phases: Phases


@dataclass(frozen=True, slots=True)
class Ground:
    """What `everstep up` has before anything runs: where, how, and for how long already."""

    state: StateDir
    settings: Loaded
    api: socket
    observe: socket
    phases: Phases
    command: str = "up"
    """Which command runs it: `up`, or `run` for the length of its job."""


async def run_stack(
    ground: Ground,
    stop: asyncio.Event,
    tell: Callable[[Ready], None],
    when_open: Callable[[DevServer], None] = lambda _: None,
) -> None:
    """Run the bus, every service and the API until `stop`; `tell` is called when it is ready.

    `when_open` is called earlier: the bus is there, and the services are about to answer.
    """
    state, phases = ground.state, ground.phases
    async with AsyncExitStack() as stack:
        importing = asyncio.get_running_loop().run_in_executor(None, services)
        server = await stack.enter_async_context(dev_server(state.path))
        phases.end("nats-server")
        version = await _set_up(server)
        phases.end("streams")
        known = await importing
        phases.end("imports")
        had_token = state.token_file.exists()
        around = Surroundings(state, ground.settings, server.settings(SERVICE), ground.api)
        opened = {
            name: await stack.enter_async_context(service(around))
            for name, service in known.items()
        }
        phases.end("services")
        when_open(server)
        running = _running(ground, server, version, list(opened))

        async def announce(stop: asyncio.Event) -> None:
            await _wait_ready(ground.api)
            phases.end("api")
            await asyncio.to_thread(state.announce, running)
            has_new_token = not had_token and state.token_file.exists()
            await asyncio.to_thread(tell, Ready(running, has_new_token, phases))
            await stop.wait()

        await _serve(ground, opened, stop, announce)


async def _serve(
    ground: Ground, opened: Mapping[str, Parts], stop: asyncio.Event, announce: Drain
) -> None:
    clock, metrics = SystemClock(), Metrics("up")
    checks: dict[str, Check] = {}
    for name, parts in opened.items():
        checks |= {f"{name}.{check}": ask for check, ask in parts.checks.items()}
        for component, statistics in parts.statistics.items():
            metrics.watch(component, statistics, of="" if component == name else name)
    within_s = ground.settings.section(ObserveSettings).check_within_s
    health = Health("up", __version__, checks, clock, within_s=within_s)
    await serve(
        *(loop for parts in opened.values() for loop in parts.loops),
        partial(measure_loop_lag, metrics, clock),
        stop=stop,
        drains=[
            *(drain for parts in opened.values() for drain in parts.drains),
            partial(serve_asgi, observe_app(health, metrics), ground.observe),
            announce,
        ],
        drain_within_s=_DRAIN_WITHIN_S,
    )


async def _set_up(server: DevServer) -> str:
    async with connect(server.settings(ADMIN), "up") as bus:
        await topology.init(bus.jetstream)
        return server_version(bus)


def _running(ground: Ground, server: DevServer, version: str, names: list[str]) -> Running:
    return Running(
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
    """Until the API answers a request: a socket that listens is no promise."""
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
