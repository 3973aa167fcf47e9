"""Everstep under Slurm: batch scripts, retries over allocations, drained nodes."""
