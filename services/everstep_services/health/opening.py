"""The health service, opened: its place on the bus, and what is to be run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everstep.bus import BusSettings, connect
from everstep.bus.errors import BusConfigError
from everstep.clock import SystemClock
from everstep.runtime import Parts
from everstep_services.health.service import Observer
from everstep_services.health.settings import HealthSettings


@asynccontextmanager
async def opened(
    settings: HealthSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AsyncIterator[Parts]:
    """The observer, whether the bus is there or not: while it is not, nobody is lost.

    Findings wait in `spool`, or below the `spool_dir` of the bus.
    """
    if spool is None and bus_settings.spool_dir is None:
        raise BusConfigError(
            "health has nowhere to keep its findings while the bus is away: set spool_dir in "
            "[bus] to a folder that it may write to"
        )
    async with connect(bus_settings, "health", spool=spool, wait=False) as bus:
        observer = Observer(settings, bus, SystemClock())
        yield Parts(
            loops=(
                observer.hear_for_ever,
                observer.follow_jobs_for_ever,
                observer.judge_for_ever,
                observer.record_for_ever,
            ),
            checks={"bus": bus.prove},
            statistics={"health": observer.statistics, "bus": bus.statistics},
        )
