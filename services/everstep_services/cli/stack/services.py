"""The services that `everstep up` runs: one line each, imported when it starts."""

import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from socket import socket

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.settings import Loaded
from everstep_services.cli.machine.state import StateDir

SERVICES = {
    "rendezvous": "everstep_services.cli.stack.rendezvous:opened",
    "health": "everstep_services.cli.stack.health:opened",
    "catalog": "everstep_services.cli.stack.catalog:opened",
    "straggler": "everstep_services.cli.stack.straggler:opened",
    "attribution": "everstep_services.cli.stack.attribution:opened",
    "logins": "everstep_services.cli.stack.logins:opened",
    "history": "everstep_services.cli.stack.history:opened",
}
"""In the order of their start: first what ranks wait for, last what takes longest to import."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a service is given."""

    state: StateDir
    settings: Loaded
    bus: BusSettings
    """How a service logs in."""
    listener: socket
    """Where the API is served."""


Service = Callable[[Surroundings], AbstractAsyncContextManager[Parts]]


def imported(name: str) -> Service:
    """How a service is opened."""
    module, _, attribute = SERVICES[name].partition(":")
    service: Service = getattr(importlib.import_module(module), attribute)
    return service
