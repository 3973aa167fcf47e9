"""The accelerator of a rank: its state, and how long its work takes."""
