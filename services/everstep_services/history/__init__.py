"""The record: facts become tables, and tables become answers."""
