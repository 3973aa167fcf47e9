"""Coming back: ranks look for what they have, agree on one checkpoint, verify it, and load it."""
