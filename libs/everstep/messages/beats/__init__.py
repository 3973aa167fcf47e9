"""What agents repeat and no service keeps: progress of ranks, and timings of their steps."""
