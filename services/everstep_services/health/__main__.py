"""The health service as a process: `python -m everstep_services.health`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.health.replica import opened
from everstep_services.health.settings import HealthSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(HealthSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "health": HealthSettings}
    sys.exit(main("health", sections, _opened, sys.argv[1:], os.environ))
