"""Faults on purpose: announced, made and undone by the agent of a job that allows them."""
