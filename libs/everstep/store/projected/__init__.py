"""The tables that are projected from the log, and how changes of them are merged."""
