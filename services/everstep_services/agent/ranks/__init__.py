"""The processes of ranks: keeper, warden, forge, and what they know of each other."""
