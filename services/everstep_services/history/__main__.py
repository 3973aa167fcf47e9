"""The history service as a process: `python -m everstep_services.history [serve|rebuild|token]`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.clock import SystemClock
from everstep.observe.connections import raise_descriptor_limit
from everstep.observe.http import listen
from everstep.observe.logs import configure
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import run, say
from everstep.service_process import serve_parts
from everstep.settings import Loaded, SettingsError, config_files, load
from everstep.store.log import FactLog
from everstep_services.history.commands import make_token, rebuild
from everstep_services.history.notifications.settings import NotifySettings
from everstep_services.history.projections.fold import fold
from everstep_services.history.replica import is_database_there, open_history, opened
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
                "notify": NotifySettings,
                "observe": ObserveSettings,
            },
            files=config_files(os.environ, asked.config),
            environ=os.environ,
        )
    except SettingsError as error:
        return say("history", error)
    configure(loaded.section(LogSettings), "history", environ=os.environ)
    raise_descriptor_limit()
    match asked.command:
        case "rebuild":
            return run("history", partial(_rebuild, loaded))
        case "token":
            return run("history", partial(_token, loaded, asked))
        case _:
            return run("history", partial(_serve, loaded))


async def _serve(loaded: Loaded, stop: asyncio.Event) -> None:
    api, observe = loaded.section(ApiSettings), loaded.section(ObserveSettings)
    listener = listen(api.host, api.port, remedy="choose another port in [api]")
    watched = listen(observe.host, observe.port, remedy="choose another port in [observe]")
    settings, bus = loaded.section(HistorySettings), loaded.section(BusSettings)
    notify = loaded.section(NotifySettings)
    if not await is_database_there(settings, stop):
        return
    async with opened(settings, api, bus, listener, api.first_token_file, notify) as parts:
        await serve_parts("history", observe, watched, parts, stop)


async def _rebuild(loaded: Loaded, _stop: asyncio.Event) -> None:
    async with open_history(loaded.section(HistorySettings)) as database:
        facts = await rebuild(FactLog(database, fold))
    sys.stdout.write(f"{facts} facts projected again\n")


async def _token(loaded: Loaded, asked: argparse.Namespace, _stop: asyncio.Event) -> None:
    async with open_history(loaded.section(HistorySettings)) as database:
        text = await make_token(
            database, asked.name, asked.scope, SystemClock(), expires_in_s=asked.expires_in_s
        )
    sys.stdout.write(f"{text}\n")


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
