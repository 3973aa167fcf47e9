"""NATS reduced to what Everstep uses: beats, facts, questions, documents, leases, blobs."""

from everstep.bus.client import connect
from everstep.bus.settings import BusSettings

__all__ = ["BusSettings", "connect"]
