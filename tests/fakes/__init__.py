"""Stand-ins that pass the same contract suite as the real thing."""
