"""The kinds of evidence, and how each is collected from outside the ranks."""
