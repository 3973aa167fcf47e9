"""What the signs of nodes mean, and which nodes are marked; without clock and I/O."""
