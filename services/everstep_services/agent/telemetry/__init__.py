"""The records and reports of an agent: facts, beats, evidence, saves."""
