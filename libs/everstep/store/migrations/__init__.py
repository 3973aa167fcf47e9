"""The history of the schema: each released step stays as it was."""
