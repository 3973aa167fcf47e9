"""Runs checks in a process of their own, which may hang, crash or be killed."""
