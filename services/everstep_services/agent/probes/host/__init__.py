"""Checks of the host: memory, clock, disk space, limits, and what debugging needs."""
