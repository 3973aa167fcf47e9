"""The attribution service, inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

from everstep.runtime import Parts
from everstep_services.attribution.replica import opened as open_service
from everstep_services.attribution.settings import AttributionSettings
from everstep_services.cli.stack.services import Surroundings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with its decisions in the state directory until the bus has them."""
    spool = around.state.path / "spool" / "attribution"
    return open_service(around.settings.section(AttributionSettings), around.bus, spool)
