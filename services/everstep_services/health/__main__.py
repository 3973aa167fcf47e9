"""The health service as a process: `python -m everstep_services.health`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from everstep import __version__
from everstep.bus import BusSettings
from everstep.clock import SystemClock
from everstep.observe.health import Health
from everstep.observe.http import listen, observe_app, serve_asgi
from everstep.observe.logs import configure
from everstep.observe.metrics import Metrics, measure_loop_lag
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import run, say, serve
from everstep.settings import Loaded, SettingsError, config_files, load
from everstep_services.health.opening import opened
from everstep_services.health.settings import HealthSettings


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 when stopped, 2 with one line for what an operator can mend."""
    parser = argparse.ArgumentParser(prog="python -m everstep_services.health")
    parser.add_argument("--config", type=Path, help="this settings file, and no other")
    asked = parser.parse_args(arguments)
    try:
        loaded = load(
            {
                "bus": BusSettings,
                "health": HealthSettings,
                "log": LogSettings,
                "observe": ObserveSettings,
            },
            files=config_files(os.environ, asked.config),
            environ=os.environ,
        )
    except SettingsError as error:
        return say("health", error)
    configure(loaded.section(LogSettings), "health", environ=os.environ)
    return run("health", partial(_serve, loaded))


async def _serve(loaded: Loaded, stop: asyncio.Event) -> None:
    observe = loaded.section(ObserveSettings)
    watched = listen(observe.host, observe.port, remedy="choose another port in [observe]")
    clock, metrics = SystemClock(), Metrics("health")
    async with opened(loaded.section(HealthSettings), loaded.section(BusSettings)) as parts:
        for component, statistics in parts.statistics.items():
            metrics.watch(component, statistics)
        health = Health("health", __version__, parts.checks, clock, within_s=observe.check_within_s)
        await serve(
            *parts.loops,
            partial(measure_loop_lag, metrics, clock),
            stop=stop,
            drains=(partial(serve_asgi, observe_app(health, metrics), watched),),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
