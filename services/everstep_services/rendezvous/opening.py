"""The rendezvous service, opened: its place on the bus, and what is to be run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everstep.bus import BusSettings, connect
from everstep.clock import SystemClock
from everstep.runtime import Parts
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings


@asynccontextmanager
async def opened(
    settings: RendezvousSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AsyncIterator[Parts]:
    """One replica; any number may run, each with a spool of its own.

    What it decided waits in `spool`, or below the `spool_dir` of the bus, for the stream.
    """
    spool = spool or bus_settings.spool_for("rendezvous")
    async with connect(bus_settings, "rendezvous", spool=spool, wait=False) as bus:
        service = Rendezvous(settings, bus, SystemClock())
        yield Parts(
            loops=(service.serve_for_ever,),
            checks={"bus": bus.prove},
            statistics={"rendezvous": service.statistics, "bus": bus.statistics},
        )
