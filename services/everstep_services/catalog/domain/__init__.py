"""The decisions of the catalog, without a clock and without I/O."""
