"""What the buckets hold: the rounds, the limits and the switches that are in force."""
