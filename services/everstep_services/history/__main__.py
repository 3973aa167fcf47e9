"""The history service as a process: `python -m everstep_services.history [serve|rebuild|token]`."""

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from everstep import __version__
from everstep.bus import BusSettings, connect
from everstep.clock import SystemClock
from everstep.observe.health import Health
from everstep.observe.http import listen, observe_app, serve_asgi
from everstep.observe.logs import configure
from everstep.observe.metrics import Metrics, measure_loop_lag
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import run, say, serve
from everstep.settings import Loaded, SettingsError, config_files, load
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.log import FactLog
from everstep.store.reads import log_head
from everstep.store.schema import upgrade
from everstep_services.history.api.app import create_app, make_context
from everstep_services.history.api.context import Connectedness
from everstep_services.history.commands import make_first_token, make_token, rebuild
from everstep_services.history.domain import fold
from everstep_services.history.news import News
from everstep_services.history.service import Projector
from everstep_services.history.settings import ApiSettings, HistorySettings


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 when done or stopped, 2 with one line for what an operator can mend."""
    asked = _parser().parse_args(arguments)
    try:
        loaded = load(
            {
                "api": ApiSettings,
                "bus": BusSettings,
                "history": HistorySettings,
                "log": LogSettings,
                "observe": ObserveSettings,
            },
            files=config_files(os.environ, asked.config),
            environ=os.environ,
        )
    except SettingsError as error:
        return say("history", error)
    configure(loaded.section(LogSettings), "history", environ=os.environ)
    match asked.command:
        case "rebuild":
            return run("history", partial(_rebuild, loaded))
        case "token":
            return run("history", partial(_token, loaded, asked))
        case _:
            return run("history", partial(_serve, loaded))


async def _serve(loaded: Loaded, stop: asyncio.Event) -> None:
    settings, api = loaded.section(HistorySettings), loaded.section(ApiSettings)
    observe = loaded.section(ObserveSettings)
    listener = listen(api.host, api.port, remedy="choose another port in [api]")
    watched = listen(observe.host, observe.port, remedy="choose another port in [observe]")
    clock, news, metrics = SystemClock(), News(), Metrics("history")
    async with (
        _opened(settings) as database,
        # Not waiting: the record answers also while the bus is away.
        connect(loaded.section(BusSettings), "history", wait=False) as bus,
    ):
        if api.first_token_file is not None:
            await make_first_token(database, api.first_token_file, clock)
        name = f"{socket.gethostname()}/{os.getpid()}"
        projector = Projector(
            settings, bus, database, FactLog(database, fold), news, clock=clock, name=name
        )
        connectedness = Connectedness(lambda: projector.is_projecting, lambda: bus.connected)
        context = await make_context(api, database, news, connectedness, clock=clock)
        metrics.watch("history", projector.statistics)
        metrics.watch("bus", bus.statistics)
        health = Health("history", __version__, {"database": partial(_answers, database)}, clock)

        async def close_streams(stop: asyncio.Event) -> None:
            await stop.wait()
            news.close()

        await serve(
            projector.project_for_ever,
            projector.poll_for_ever,
            context.gate.write_used_for_ever,
            partial(measure_loop_lag, metrics, clock),
            stop=stop,
            drains=(
                partial(serve_asgi, create_app(context), listener),
                partial(serve_asgi, observe_app(health, metrics), watched),
                close_streams,
            ),
        )
        await context.gate.write_used()


async def _rebuild(loaded: Loaded, _stop: asyncio.Event) -> None:
    async with _opened(loaded.section(HistorySettings)) as database:
        facts = await rebuild(FactLog(database, fold))
    sys.stdout.write(f"{facts} facts projected again\n")


async def _token(loaded: Loaded, asked: argparse.Namespace, _stop: asyncio.Event) -> None:
    async with _opened(loaded.section(HistorySettings)) as database:
        text = await make_token(
            database, asked.name, asked.scope, SystemClock(), expires_in_s=asked.expires_in_s
        )
    sys.stdout.write(f"{text}\n")


@asynccontextmanager
async def _opened(settings: HistorySettings) -> AsyncIterator[Database]:
    limits = StoreLimits(
        readers=settings.database_readers,
        read_within_s=settings.read_within_s,
        write_within_s=settings.write_within_s,
    )
    password_file = settings.database_password_file
    async with open_database(
        settings.database_url, password_file=password_file, limits=limits
    ) as database:
        await upgrade(database)
        yield database


async def _answers(database: Database) -> None:
    await log_head(database)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m everstep_services.history")
    parser.add_argument("--config", type=Path, help="this settings file, and no other")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("serve", help="project facts and answer questions (the default)")
    commands.add_parser("rebuild", help="make the projected tables again from the log")
    token = commands.add_parser("token", help="make a token for REST, and print it once")
    token.add_argument("--name", required=True, help="whose it is")
    token.add_argument("--scope", choices=["read", "operate", "admin"], default="read")
    token.add_argument("--expires-in-s", type=int, help="by default it never expires")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
