"""The one Everstep process on each node: starts, watches and stops ranks."""
