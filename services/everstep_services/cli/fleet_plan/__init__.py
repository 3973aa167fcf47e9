"""How a fleet will do: simulated trainings under failures, and what follows for its owner."""
