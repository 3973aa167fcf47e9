"""What health decides about nodes, limits and stalls of each job; pure."""
