"""The catalog service as a process: `python -m everstep_services.catalog`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.catalog.replica import opened
from everstep_services.catalog.settings import CatalogSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(CatalogSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "catalog": CatalogSettings}
    sys.exit(main("catalog", sections, _opened, sys.argv[1:], os.environ))
