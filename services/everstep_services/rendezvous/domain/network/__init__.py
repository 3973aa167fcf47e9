"""The network test for which a round waits, and what follows from it."""
