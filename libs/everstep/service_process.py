"""A service as a process: its settings, its signals, its `/healthz` and `/metrics`."""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from socket import socket
from typing import TypeVar

from everstep import __version__
from everstep.bus import BusSettings
from everstep.clock import SystemClock
from everstep.observe.connections import raise_descriptor_limit
from everstep.observe.health import Health
from everstep.observe.http import listen, observe_app, serve_asgi
from everstep.observe.logs import configure
from everstep.observe.metrics import MetricRegistry, measure_loop_lag
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.observe.traces import SpanExporter
from everstep.runtime import Parts, keep_what_is_loaded, run, say, serve
from everstep.settings import Loaded, Settings, SettingsError, config_files, load

Open = Callable[[Loaded], AbstractAsyncContextManager[Parts]]
Section = TypeVar("Section", bound=Settings)


def main(
    name: str,
    sections: Mapping[str, type[Settings]],
    opened: Open,
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Run a service that has no commands of its own; the exit code.

    0 when stopped; 2, with one line, for an error that an operator can repair.
    """
    parser = argparse.ArgumentParser(prog=f"python -m everstep_services.{name}")
    parser.add_argument("--config", type=Path, help="this settings file, and no other")
    asked = parser.parse_args(arguments)
    every: dict[str, type[Settings]] = {**sections, "log": LogSettings, "observe": ObserveSettings}
    try:
        loaded = load(every, files=config_files(environ, asked.config), environ=environ)
    except SettingsError as error:
        return say(name, error)
    configure(loaded.section(LogSettings), name, environ=environ)
    raise_descriptor_limit()
    return run(name, partial(_serve, name, loaded, opened))


def run_replica(
    name: str,
    settings: type[Section],
    opened: Callable[[Section, BusSettings], AbstractAsyncContextManager[Parts]],
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Run a service that only needs the settings in its section, and those of the bus."""

    def by_loaded(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
        return opened(loaded.section(settings), loaded.section(BusSettings))

    return main(name, {"bus": BusSettings, name: settings}, by_loaded, arguments, environ)


async def _serve(name: str, loaded: Loaded, opened: Open, stop: asyncio.Event) -> None:
    observe = loaded.section(ObserveSettings)
    listener = listen(observe.host, observe.port, remedy="choose another port in [observe]")
    async with opened(loaded) as parts:
        await serve_parts(name, observe, listener, parts, stop)


async def serve_parts(
    name: str, observe: ObserveSettings, listener: socket, parts: Parts, stop: asyncio.Event
) -> None:
    """Run an open service until `stop`, and serve its health and metrics at the listener."""
    clock, metrics = SystemClock(), MetricRegistry(name)
    for component, statistics in parts.statistics.items():
        metrics.watch(component, statistics)
    metrics.collect(parts.collectors)
    traces = SpanExporter(observe.traces_url, name, clock)
    if observe.traces_url:
        metrics.watch("traces", traces.statistics)
    keep_what_is_loaded()
    within_s = observe.check_within_s
    health = Health(name, __version__, parts.checks, clock, within_s=within_s)
    await serve(
        *parts.loops,
        *((traces.export_for_ever,) if observe.traces_url else ()),
        partial(measure_loop_lag, metrics, clock),
        stop=stop,
        drains=(*parts.drains, partial(serve_asgi, observe_app(health, metrics), listener)),
    )
