"""What an agent decides: pure, without a clock and without I/O."""
