"""The catalog service, inside `everstep up`."""

from contextlib import AbstractAsyncContextManager

from everstep.runtime import Parts
from everstep_services.catalog.replica import opened as open_service
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.cli.stack.services import Surroundings


def opened(around: Surroundings) -> AbstractAsyncContextManager[Parts]:
    """As in production, with its decisions in the state directory until the bus has them."""
    spool = around.state.path / "spool" / "catalog"
    return open_service(around.settings.section(CatalogSettings), around.bus, spool)
