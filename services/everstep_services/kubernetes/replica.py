"""A replica of the node watcher: connects it to the bus, and names its loops."""

from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from everstep.bus import BusSettings
from everstep.replicas import on_bus
from everstep.runtime import Parts
from everstep_services.kubernetes.service import NodeWatcher
from everstep_services.kubernetes.settings import KubernetesSettings


def opened(
    settings: KubernetesSettings, bus_settings: BusSettings, spool: Path | None = None
) -> AbstractAsyncContextManager[Parts]:
    """Open a replica, whether or not the bus and the API server are there."""
    return on_bus("kubernetes", bus_settings, partial(NodeWatcher, settings), spool)
