"""Transfers of states between agents: the protocol, its two ends, and who sends and fetches."""
