"""Imports nats-py without aiohttp, which it uses for WebSockets only: the bus has none.

Where aiohttp is installed, as it is with Lightning, nats-py would import it, too: a sixth of a
second of each start of an agent.
"""

import importlib
import sys


def import_without(module: str, unused: str) -> None:
    """Import a module as if another that it can do without were not installed."""
    if unused in sys.modules or module in sys.modules:
        return
    sys.modules[unused] = None  # type: ignore[assignment]  # Python's way to forbid an import
    try:
        importlib.import_module(module)
    finally:
        del sys.modules[unused]


import_without("nats", unused="aiohttp")
