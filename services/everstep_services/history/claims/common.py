"""What every claim looks like."""

from collections.abc import Callable
from typing import Any

from everstep.store.changes import Changes, Recorded
from everstep.store.shapes import NODES

Claim = Callable[[Changes, Recorded, Any], None]
"""Says what one fact changes. The fact is given once more, for its type."""


def about_node(changes: Changes, one: Recorded, node: str, **values: Any) -> None:
    """Change a node's row, and note that it was heard of."""
    changes.merge(NODES, (node,), first_n=one.n, last_n=one.n, updated_us=one.received_us, **values)
