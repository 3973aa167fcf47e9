"""The logs, the metrics and the health of a process."""
