"""A training whose processes go from one round into the next, with their state in memory."""
