"""The services: one folder each, meeting on the bus and nowhere else."""
