"""What is decided about slow ranks: pure, on arrays."""
