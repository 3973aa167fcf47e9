"""The process that makes a rank's checkpoints durable. It imports no torch."""
