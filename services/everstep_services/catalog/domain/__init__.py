"""What the catalog decides, without a clock and without I/O."""
