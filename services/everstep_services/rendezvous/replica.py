"""A replica of rendezvous: connects it to the bus, and names its loops."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.replicas import on_bus
from everstep.runtime import Parts
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings


def opened(
    settings: RendezvousSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AbstractAsyncContextManager[Parts]:
    """Open one replica; any number may run, each with a spool of its own.

    Its facts wait for the stream in `spool`, or below the `spool_dir` of the bus.
    """
    return on_bus("rendezvous", bus_settings, partial(Rendezvous, settings), spool)
