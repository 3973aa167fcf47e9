"""What speaks against nodes, over all jobs, and who may not join."""
