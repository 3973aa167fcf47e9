"""Services that record facts start only where they can keep them."""

from types import ModuleType

import pytest

from everstep.bus import BusSettings
from everstep.bus.errors import BusConfigError
from everstep.settings import Settings
from everstep_services.catalog import replica as catalog
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.health import replica as health
from everstep_services.health.settings import HealthSettings
from everstep_services.rendezvous import replica as rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from everstep_services.straggler import replica as straggler
from everstep_services.straggler.settings import StragglerSettings


@pytest.mark.parametrize(
    ("name", "service", "settings"),
    [
        ("catalog", catalog, CatalogSettings()),
        ("health", health, HealthSettings()),
        ("rendezvous", rendezvous, RendezvousSettings()),
        ("straggler", straggler, StragglerSettings()),
    ],
)
async def test_a_service_without_a_spool_says_what_to_set(
    name: str, service: ModuleType, settings: Settings
) -> None:
    with pytest.raises(BusConfigError, match=f"^{name} has nowhere to keep its facts .* spool_dir"):
        async with service.opened(settings, BusSettings()):
            pass
