"""The rendezvous service inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

from everstep.runtime import Parts
from everstep_services.cli.stack.services import Surroundings
from everstep_services.rendezvous.replica import opened as open_service
from everstep_services.rendezvous.settings import RendezvousSettings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with its decisions in the state directory until the bus has them."""
    spool = around.state.path / "spool" / "rendezvous"
    return open_service(around.settings.section(RendezvousSettings), around.bus, spool)
