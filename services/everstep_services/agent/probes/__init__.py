"""Examines this node: one module a check, each of which also runs alone as `everstep check`."""
