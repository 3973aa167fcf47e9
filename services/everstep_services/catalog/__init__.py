"""Knows which checkpoints there are: where, how good, and how many lost nodes they survive."""
