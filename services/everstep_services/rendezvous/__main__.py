"""The rendezvous service as a process: `python -m everstep_services.rendezvous`."""

import os
import sys

from everstep.service_process import run_replica
from everstep_services.rendezvous.replica import opened
from everstep_services.rendezvous.settings import RendezvousSettings

if __name__ == "__main__":
    sys.exit(run_replica("rendezvous", RendezvousSettings, opened, sys.argv[1:], os.environ))
