"""Where the time of this node's ranks goes: measured here, and compared by straggler."""
