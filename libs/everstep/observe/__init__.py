"""What a process shows of itself: logs, metrics, and its health."""
