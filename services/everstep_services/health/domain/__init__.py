"""The decisions of health about nodes, limits and stalls of each job; pure."""
