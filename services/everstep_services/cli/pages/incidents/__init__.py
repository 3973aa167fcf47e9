"""The story of an incident: who caused it, what was decided, where the time went."""
