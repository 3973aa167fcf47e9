"""The attribution service as a process: `python -m everstep_services.attribution`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.attribution.replica import opened
from everstep_services.attribution.settings import AttributionSettings

if __name__ == "__main__":
    sys.exit(run_replica("attribution", AttributionSettings, opened, sys.argv[1:], os.environ))
