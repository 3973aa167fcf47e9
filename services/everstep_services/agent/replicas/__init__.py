"""Checkpoints on this node: what ranks say of them, and the states that nodes hold in memory."""
