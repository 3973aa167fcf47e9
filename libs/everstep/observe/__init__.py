"""What a process tells about itself: logs, metrics, and whether it is healthy."""
