"""The logins service as a process: `python -m everstep_services.logins`."""

import os
import sys
from contextlib import AbstractAsyncContextManager

from everstep.bus import BusSettings
from everstep.bus.auth.accounts import Signers
from everstep.bus.errors import BusConfigError
from everstep.runtime import Parts
from everstep.service_process import main
from everstep.settings import Loaded, Settings
from everstep_services.logins.service import opened
from everstep_services.logins.settings import LoginSettings


def _opened(loaded: Loaded) -> AbstractAsyncContextManager[Parts]:
    settings = loaded.section(LoginSettings)
    if settings.keys_dir is None:
        raise BusConfigError(
            "keys_dir in [logins] is not set: name the folder with the keys that sign logins"
        )
    signers = Signers.opened(settings.keys_dir, settings.valid_s)
    return opened(signers, loaded.section(BusSettings))


if __name__ == "__main__":
    sections: dict[str, type[Settings]] = {"bus": BusSettings, "logins": LoginSettings}
    sys.exit(main("logins", sections, _opened, sys.argv[1:], os.environ))
