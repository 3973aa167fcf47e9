"""Probes: checks in short intervals, in parallel with a training, at a bounded cost."""
