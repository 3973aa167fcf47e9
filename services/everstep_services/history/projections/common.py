"""Helpers of all projections."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from everstep.messages import BlobRef
from everstep.store.projected.changes import Changes, LoggedFact, Value, compact
from everstep.store.projected.nodes import NODES

Projection = Callable[[Changes, LoggedFact, Any], None]
"""Adds the changes of one fact. The fact is passed once more, for its type."""


def update_node(changes: Changes, entry: LoggedFact, node: str, **values: Value) -> None:
    """Change a node's row, and note the fact in it."""
    changes.merge(
        NODES, (node,), first_n=entry.n, last_n=entry.n, updated_us=entry.received_us, **values
    )


def parts(of: Sequence[msgspec.Struct]) -> str:
    """Parts of a message as the text of a column."""
    return compact([msgspec.structs.asdict(part) for part in of])


def blob_text(blob: BlobRef | None) -> str | None:
    """A reference to a blob as the text of a column; `BlobRef` decodes it."""
    return None if blob is None else compact(msgspec.structs.asdict(blob))
