"""A machine: its state directory, its bus, its checks, and what may be wrong with it."""
