"""Restores: ranks discover what they have, agree on one checkpoint, verify it, and load it."""
