"""The services that `everstep up` runs: one line each, imported when it starts."""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from socket import socket

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.settings import Loaded
from everstep_services.cli.state import StateDir

SERVICES = {
    "history": "everstep_services.cli.stack.history:opened",
    "health": "everstep_services.cli.stack.health:opened",
    "rendezvous": "everstep_services.cli.stack.rendezvous:opened",
    "catalog": "everstep_services.cli.stack.catalog:opened",
}


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


def services() -> Mapping[str, Service]:
    """Every service, imported."""
    found: dict[str, Service] = {}
    for name, place in SERVICES.items():
        module, _, attribute = place.partition(":")
        found[name] = getattr(importlib.import_module(module), attribute)
    return found
