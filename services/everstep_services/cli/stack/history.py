"""The history service and the API, inside `everstep up`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from everstep.bus import connect
from everstep.clock import SystemClock
from everstep.observe.http import serve_asgi
from everstep.settings import DEFAULT
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.log import FactLog
from everstep.store.reads import log_head
from everstep.store.schema import upgrade
from everstep_services.cli.stack.services import Parts, Surroundings
from everstep_services.history.api.app import create_app, make_context
from everstep_services.history.api.context import Connectedness
from everstep_services.history.commands import make_first_token
from everstep_services.history.domain import fold
from everstep_services.history.news import News
from everstep_services.history.service import Projector
from everstep_services.history.settings import ApiSettings, HistorySettings


@asynccontextmanager
async def opened(around: Surroundings) -> AsyncIterator[Parts]:
    """Open the database and the bus; the projector and the API are the parts."""
    settings, clock, news = _settings(around), SystemClock(), News()
    async with (
        _database(settings) as database,
        connect(around.bus, "history") as bus,
    ):
        await make_first_token(database, around.state.token_file, clock)
        projector = Projector(
            settings, bus, database, FactLog(database, fold), news, clock=clock, name="up"
        )
        connectedness = Connectedness(lambda: projector.is_projecting, lambda: bus.connected)
        context = await make_context(
            around.settings.section(ApiSettings), database, news, connectedness, clock=clock
        )

        async def close_streams(stop: asyncio.Event) -> None:
            await stop.wait()
            news.close()

        yield Parts(
            loops=(
                projector.project_for_ever,
                projector.poll_for_ever,
                context.gate.write_used_for_ever,
            ),
            drains=(partial(serve_asgi, create_app(context), around.listener), close_streams),
            checks={"bus": bus.prove, "database": partial(_read, database)},
            statistics={"history": projector.statistics, "bus": bus.statistics},
        )
        await context.gate.write_used()


def _settings(around: Surroundings) -> HistorySettings:
    """As set, but the database is in the state directory unless somebody named one."""
    settings = around.settings.section(HistorySettings)
    if around.settings.origins["history.database_url"] != DEFAULT:
        return settings
    url = f"sqlite:///{around.state.path / 'history.db'}"
    return msgspec.structs.replace(settings, database_url=url)


@asynccontextmanager
async def _database(settings: HistorySettings) -> AsyncIterator[Database]:
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


async def _read(database: Database) -> None:
    await log_head(database)
