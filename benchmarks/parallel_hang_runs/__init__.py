"""Trainings in groups of tensor, pipeline and data parallelism; in each, one thing fails."""
