"""What an agent records and reports: facts, beats, evidence, saves."""
