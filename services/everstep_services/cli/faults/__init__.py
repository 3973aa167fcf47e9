"""`everstep inject`: which faults, where and when; and the agents that make them."""
