"""Composes a replica of the history service: its database, its bus, its loops and its API."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from everstep import subjects
from everstep.backoff import Backoff
from everstep.bus import BusSettings, connect, topology
from everstep.bus.derived_ids import DerivedIds
from everstep.bus.server.copies import ServerWatch
from everstep.clock import Clock, SystemClock
from everstep.messages import Fact, kind_of
from everstep.messages.codec import encode
from everstep.observe.connections import ConnectionLimits
from everstep.observe.http import serve_asgi
from everstep.runtime import Parts
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.errors import DatabaseAwayError
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.job_removal import JobRemovals
from everstep.store.log import FactLog
from everstep.store.queries import log_head
from everstep.store.schema import upgrade
from everstep_services.history.api.app import create_app, make_context
from everstep_services.history.api.context import Connectedness
from everstep_services.history.commands import make_first_token
from everstep_services.history.job_metrics import JobMetrics
from everstep_services.history.log_copy import LogCopier
from everstep_services.history.notifications.metrics import TargetMetrics
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import NotifySettings
from everstep_services.history.notifications.targets import check_secrets
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.projections.fold import fold
from everstep_services.history.projector import Projector
from everstep_services.history.retention import JobRetention
from everstep_services.history.settings import ApiSettings, HistorySettings

log = logging.getLogger(__name__)

_LAST_NOTE_WITHIN_S = 5.0
_BUS_LOOKED_AT_EVERY_S = 0.5
_DATABASE_FIRST_S = 0.25
_DATABASE_MOST_S = 5.0


@asynccontextmanager
async def opened(  # noqa: PLR0913  each is a part that its process has
    settings: HistorySettings,
    api: ApiSettings,
    bus_settings: BusSettings,
    listener: socket.socket,
    first_token: Path | None,
    notify: NotifySettings | None = None,
    report_unsent: Callable[[str], None] | None = None,
) -> AsyncIterator[Parts]:
    """The projector and the API, whether the bus is there or not: the record answers alone.

    With `report_unsent` no replica takes over: the last messages are sent before the end, and
    `report_unsent` gets a sentence on those that could not be sent.
    """
    clock, notifier = SystemClock(), LogNotifier()
    notify = notify or NotifySettings()
    await asyncio.to_thread(check_secrets, notify)
    async with (
        open_history(settings) as database,
        connect(bus_settings.of_service, "history", wait=False) as bus,
    ):
        if first_token is not None:
            await make_first_token(database, first_token, clock)
        fact_log, name = FactLog(database, fold), f"{socket.gethostname()}/{os.getpid()}"
        projector = Projector(settings, bus, database, fact_log, notifier, clock=clock, name=name)
        connectedness = Connectedness(lambda: projector.is_projecting, lambda: bus.connected)
        notifications = Notifications(notify, bus, clock)
        context = await make_context(
            api, database, notifier, connectedness, clock=clock, bus=bus,
            notifications=notifications, clock_offset_limit_s=settings.clock_offset_limit_s,
        )  # fmt: skip
        most_bytes = settings.keep_log_bytes
        job_metrics = JobMetrics(database, context.goodput, context.beats, clock)
        copier = LogCopier(
            EvidenceCopies(database), bus.blobs, notifier, clock=clock, most_bytes=most_bytes
        )

        async def put_on_record(fact: Fact) -> None:
            subject = subjects.fact(fact.job, kind_of(fact))
            await bus.jetstream.publish(subject, encode(fact), {"Nats-Msg-Id": fact.id})

        ids = DerivedIds(bus, clock)
        retention = JobRetention(settings, JobRemovals(database), bus, clock, put_on_record, ids.of)
        limits = ConnectionLimits(
            most=api.max_connections,
            headers_within_s=api.headers_within_s,
            body_within_s=api.body_within_s,
        )

        async def close_streams(stop: asyncio.Event) -> None:
            await stop.wait()
            notifier.close()

        servers = ServerWatch(bus.jetstream)
        yield Parts(
            loops=(
                servers.look_for_ever,
                projector.project_for_ever,
                projector.poll_for_ever,
                partial(_announce_bus_for_ever, connectedness, notifier, clock),
                partial(copier.copy_for_ever, is_mine=lambda: projector.is_projecting),
                ids.keep_for_ever,
                partial(retention.remove_for_ever, is_mine=lambda: projector.is_projecting),
                partial(
                    job_metrics.refresh_for_ever,
                    is_mine=lambda: projector.is_projecting,
                    stands_by=lambda: projector.stands_by,
                ),
                partial(context.maintenance.act_for_ever, is_mine=lambda: projector.is_projecting),
                context.auth.write_used_for_ever,
                context.beats.hear_for_ever,
                *notifications.loops,
                partial(
                    topology.keep_for_ever,
                    bus.jetstream,
                    replicas=bus_settings.replicas,
                    retention=bus_settings,
                ),
            ),
            drains=(
                partial(serve_asgi, create_app(context), listener, limits=limits),
                close_streams,
                *(
                    ()
                    if report_unsent is None
                    else (partial(notifications.send_last, report=report_unsent),)
                ),
            ),
            checks={"bus": bus.prove, "database": partial(_answers, database)},
            statistics={
                "history": projector.statistics,
                "history_beats": context.beats.statistics,
                "history_retention": retention.statistics,
                "notify": notifications.statistics,
                "bus": bus.statistics,
                "servers": servers.statistics,
            },
            collectors=(job_metrics, TargetMetrics(notifications)),
        )
        with contextlib.suppress(TimeoutError):  # a database that hangs does not keep us
            async with asyncio.timeout(_LAST_NOTE_WITHIN_S):
                await context.auth.write_used()


@asynccontextmanager
async def open_history(settings: HistorySettings) -> AsyncIterator[Database]:
    """The database, at the newest schema."""
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


async def is_database_there(settings: HistorySettings, stop: asyncio.Event) -> bool:
    """Wait until the database answers; False if the process is asked to stop before that.

    An error that does not pass by itself, such as a wrong password, is raised.
    """
    backoff = Backoff(_DATABASE_FIRST_S, _DATABASE_MOST_S)
    while not stop.is_set():
        try:
            async with open_history(settings):
                return True
        except DatabaseAwayError as error:
            log.warning("history_waits_for_its_database error=%s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.failed()):
                await stop.wait()
    return False


async def _announce_bus_for_ever(
    connectedness: Connectedness, notifier: LogNotifier, clock: Clock
) -> None:
    """Wake live streams when the bus goes away or comes back: they tell the pages."""
    was_connected = connectedness.is_bus_connected()
    while True:
        await clock.sleep(_BUS_LOOKED_AT_EVERY_S)
        if connectedness.is_bus_connected() != was_connected:
            was_connected = not was_connected
            notifier.interrupt()


async def _answers(database: Database) -> None:
    await log_head(database)
