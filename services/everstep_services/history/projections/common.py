"""What every claim looks like."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from everstep.messages import BlobRef
from everstep.store.projected.changes import Changes, LoggedFact, compact
from everstep.store.projected.nodes import NODES

Projection = Callable[[Changes, LoggedFact, Any], None]
"""Says what one fact changes. The fact is given once more, for its type."""


def update_node(changes: Changes, entry: LoggedFact, node: str, **values: Any) -> None:
    """Change a node's row, and note that it was heard of."""
    changes.merge(
        NODES, (node,), first_n=entry.n, last_n=entry.n, updated_us=entry.received_us, **values
    )


def parts(of: Sequence[msgspec.Struct]) -> str:
    """Pieces of a message, as they stand in a column."""
    return compact([msgspec.structs.asdict(part) for part in of])


def blob_text(blob: BlobRef | None) -> str | None:
    """Where a blob is, as it stands in a column; `BlobRef` reads it back."""
    return None if blob is None else compact(msgspec.structs.asdict(blob))
