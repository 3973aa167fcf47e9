"""The straggler service as a process: `python -m everstep_services.straggler`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.straggler.replica import opened
from everstep_services.straggler.settings import StragglerSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(StragglerSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "straggler": StragglerSettings}
    sys.exit(main("straggler", sections, _opened, sys.argv[1:], os.environ))
