"""Traces of trainings with slow ranks, from seeds, to score the verdict and prices on."""
