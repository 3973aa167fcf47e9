"""Facts: immutable events that are kept, a module for each area."""
