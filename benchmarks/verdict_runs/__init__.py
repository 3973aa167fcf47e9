"""Verdicts about trainings of the corpus: what was said of each, and how often it is right."""
