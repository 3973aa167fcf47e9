"""Checks of this node: one module for each check, which also runs alone as `everstep check`."""
