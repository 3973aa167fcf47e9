"""The attribution service as a process: `python -m everstep_services.attribution`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.attribution.replica import opened
from everstep_services.attribution.settings import AttributionSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(AttributionSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "attribution": AttributionSettings}
    sys.exit(main("attribution", sections, _opened, sys.argv[1:], os.environ))
