"""The rendezvous service as a process: `python -m everstep_services.rendezvous`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.rendezvous.replica import opened
from everstep_services.rendezvous.settings import RendezvousSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(RendezvousSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "rendezvous": RendezvousSettings}
    sys.exit(main("rendezvous", sections, _opened, sys.argv[1:], os.environ))
