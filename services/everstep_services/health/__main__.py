"""The health service as a process: `python -m everstep_services.health`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.health.replica import opened
from everstep_services.health.settings import HealthSettings

if __name__ == "__main__":
    sys.exit(run_replica("health", HealthSettings, opened, sys.argv[1:], os.environ))
