"""What is removed from the record, when, and at which pace."""
