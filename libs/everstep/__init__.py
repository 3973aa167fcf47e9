"""The parts that all of Everstep shares: messages, the bus, the store, the runtime."""

__version__ = "0.1.0"
