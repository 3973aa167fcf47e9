"""The health service, inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

from everstep.runtime import Parts
from everstep_services.cli.stack.services import Surroundings
from everstep_services.health.replica import opened as open_service
from everstep_services.health.settings import HealthSettings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with its findings in the state directory until the bus has them."""
    spool = around.state.path / "spool" / "health"
    return open_service(around.settings.section(HealthSettings), around.bus, spool)
