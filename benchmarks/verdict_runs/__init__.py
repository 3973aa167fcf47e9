"""Verdicts about trainings of the corpus: the verdict of each, and how often it is right."""
