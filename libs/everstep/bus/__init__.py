"""NATS reduced to what Everstep uses: beats, facts, questions, documents, leases, blobs."""

from everstep.bus import nats_import  # noqa: F401  before the others import it
from everstep.bus.client import connect
from everstep.bus.settings import BusSettings

__all__ = ["BusSettings", "connect"]
