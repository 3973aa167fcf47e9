"""The output of commands that show the record, one module a topic."""
