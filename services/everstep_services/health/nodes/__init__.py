"""The evidence against nodes, over all jobs, and the nodes that may not join."""
