"""The data that the analysis keeps of one rank's dump."""

from typing import Literal

import msgspec

State = Literal["scheduled", "started", "completed"]


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A collective or a transfer that the rank has begun, and that is not over."""

    sequence: int
    operation: str
    """The operation and its tensors, in words."""
    state: State
    created_ns: int
    peer: int | None = None
    """The other rank of a transfer, by its place in the group; None for a collective."""
    is_send: bool = False
    root: int | None = None
    """The root of a collective, by its place in the group, where the rank's stack tells it."""
    where: str = ""
    """The line of the script, where the dump has stacks."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one rank in one process group."""

    name: str
    description: str = ""
    members: bytes = b""
    """All ranks of the group in the group's order, four bytes each; empty where the dump does not
    list them."""
    first: int = 0
    """The first collective that the ring still has; 0 for none."""
    calls: bytes = b""
    """A digest of 8 bytes for each collective from `first` on: equal for equal calls, and zero
    where the ring has a gap."""
    enqueued: int = 0
    """The last collective that the rank has entered."""
    completed: int = 0
    """The last one up to which all are over."""
    has_status: bool = False
    """Whether the dump has the group's progress, apart from its entries."""
    pending: tuple[Pending, ...] = ()
    """The oldest ones that are not over, oldest first."""
    sends: tuple[tuple[int, int], ...] = ()
    """How many transfers to each peer the ring has: `(peer, number)`."""
    receives: tuple[tuple[int, int], ...] = ()
    longest_gap_ns: int = 0
    """The longest time between two calls that follow each other."""
    knows_starts: bool = False
    """Whether the backend reports that a collective has started, as NCCL does and gloo does not."""

    @property
    def has_calls(self) -> bool:
        """Whether the dump has entries of the group, and not its status alone."""
        return bool(self.calls or self.pending or self.sends or self.receives)


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one rank's dump."""

    rank: int
    version: str = ""
    newest_ns: int = 0
    """The newest time in the dump, by the rank's own clock."""
    taken_ns: int = 0
    """When the dump was written, by the same clock; 0 if unknown."""
    entries: int = 0
    lost: int = 0
    """How many entries the ring had to overwrite."""
    groups: tuple[GroupRecord, ...] = ()
    texts: tuple[tuple[int, str], ...] = ()
    """The texts of the digests."""
    problems: tuple[str, ...] = ()
    """The parts that could not be read."""
    where: str = ""
    """The call and the line in which its stack is, where there is one."""
    is_partial: bool = False
    """Whether entries are missing that could not be read: the rank may wait in one of them."""


class UnreadableDump(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is not a dump, or an incomplete one."""

    name: str
    reason: str
    rank: int | None = None
    is_evidence: bool = True
    """Whether it counts against the rank; a link to nothing, for one, does not."""
