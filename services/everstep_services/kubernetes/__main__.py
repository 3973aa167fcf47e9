"""The node watcher as a process: `python -m everstep_services.kubernetes`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.kubernetes.replica import opened
from everstep_services.kubernetes.settings import KubernetesSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    return opened(loaded.section(KubernetesSettings), loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "kubernetes": KubernetesSettings}
    sys.exit(main("kubernetes", sections, _opened, sys.argv[1:], os.environ))
