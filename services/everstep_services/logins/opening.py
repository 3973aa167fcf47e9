"""Opens the logins service, for its own process and for `everstep up`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everstep.bus import BusSettings, connect
from everstep.bus.accounts import Signers
from everstep.runtime import Parts
from everstep_services.logins.service import LoginService


@asynccontextmanager
async def opened(signers: Signers, bus_settings: BusSettings) -> AsyncIterator[Parts]:
    """The service, open whether the bus is there or not."""
    async with connect(bus_settings, "logins", wait=False) as bus:
        service = LoginService(bus, signers)
        yield Parts(
            loops=service.loops,
            checks={"bus": bus.prove},
            statistics={"logins": service.statistics, "bus": bus.statistics},
        )
