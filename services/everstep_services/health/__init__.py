"""Which nodes are lost: only a process that hears all nodes can tell."""
