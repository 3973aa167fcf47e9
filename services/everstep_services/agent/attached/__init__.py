"""Attach mode: watch and report ranks that another launcher has started. Nothing here acts."""
