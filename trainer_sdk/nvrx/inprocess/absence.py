"""What the monitor process does for a rank that is gone; it imports torch only then."""

import datetime
from typing import Any

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from trainer_sdk.nvrx.inprocess.iteration_store import IterationStore

AGAIN, DONE, END = "again", "done", "end"
"""The barriers: before the next iteration, after the function, and before the store may go."""
_WITHIN = datetime.timedelta(seconds=30)


def record_loss(
    place: "dict[str, Any]", prefix: str, rank: int, world_size: int, initial_rank: int
) -> None:
    """Record a lost rank of an iteration, and arrive at the barriers in its place."""
    store = _connect(place)
    shared = IterationStore(store, prefix, world_size)
    if shared.is_full(DONE):
        return  # all ranks had completed the function
    shared.lose(rank)
    shared.interrupt(rank, "TERMINATED")
    shared.arrive(AGAIN, rank)
    IterationStore(store, prefix.rpartition("/")[0], world_size).arrive(END, initial_rank)


def place_of(store: Any) -> "dict[str, Any] | None":
    """How another process reaches a store; None for a store that only this process has."""
    if isinstance(store, TCPStore):
        return {"host": store.host, "port": store.port}
    path = getattr(store, "path", "")
    if isinstance(store, FileStore) and path:
        return {"file": path}
    return None


def _connect(place: "dict[str, Any]") -> Any:
    if "file" in place:
        return FileStore(place["file"], -1)
    return TCPStore(
        place["host"], place["port"], is_master=False, timeout=_WITHIN, wait_for_workers=False
    )
