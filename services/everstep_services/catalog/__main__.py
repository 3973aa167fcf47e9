"""The catalog service as a process: `python -m everstep_services.catalog`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.catalog.replica import opened
from everstep_services.catalog.settings import CatalogSettings

if __name__ == "__main__":
    sys.exit(run_replica("catalog", CatalogSettings, opened, sys.argv[1:], os.environ))
