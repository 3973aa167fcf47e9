"""The decisions of an agent: pure, without a clock and without I/O."""
