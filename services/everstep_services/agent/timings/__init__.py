"""Where the time of this node's ranks goes, told once a window: for straggler, which compares."""
