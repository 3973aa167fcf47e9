"""What the commands print of the record, one module a topic."""
