"""Decisions about slow ranks: pure, on arrays."""
