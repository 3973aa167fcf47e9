"""The straggler service as a process: `python -m everstep_services.straggler`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.straggler.replica import opened
from everstep_services.straggler.settings import StragglerSettings

if __name__ == "__main__":
    sys.exit(run_replica("straggler", StragglerSettings, opened, sys.argv[1:], os.environ))
