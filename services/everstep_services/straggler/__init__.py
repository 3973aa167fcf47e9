"""Which ranks are slow, why, and what they cost. In running jobs, and in traces."""
