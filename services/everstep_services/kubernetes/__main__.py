"""The node watcher as a process: `python -m everstep_services.kubernetes`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.kubernetes.replica import opened
from everstep_services.kubernetes.settings import KubernetesSettings

if __name__ == "__main__":
    sys.exit(run_replica("kubernetes", KubernetesSettings, opened, sys.argv[1:], os.environ))
