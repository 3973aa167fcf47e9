"""A replica of the node watcher, for the process that runs it."""

from everstep.replicas import opening
from everstep_services.kubernetes.service import NodeWatcher

opened = opening("kubernetes", NodeWatcher)
"""Opens a replica, whether or not the bus and the API server are there."""
