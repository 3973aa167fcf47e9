"""Replicas: the states that nodes hold in memory for each other."""

from everstep.messages.base import Count, Fact, Int, Name, RoundFact


class ReplicaStored(RoundFact, frozen=True, kw_only=True, tag="replica_stored.v1"):
    """A node holds a verified copy of another node's state.

    The holder's agent sends this not for each step, but when a copy becomes complete for the
    first time in a round, moves, or was repaired.
    """

    owner_slot: Count
    """The slot whose state it is."""
    owner: Name
    """The node that saved the state."""
    holder: Name
    """The node that holds the copy."""
    step: Count
    """The step."""
    size_bytes: Count
    """The size of the copy."""
    coding: Name = "mirror"
    """`mirror`, or `erasure`: the holder has one part of several."""
    part: Count = 0
    """The number of the part."""
    parts_needed: Count = 1
    """How many parts restore the state."""
    hash: str = ""
    """The xxh3-128 of the copy or part."""
    took_s: float = 0.0
    """The time from the first byte until the copy was verified."""


class ReplicaLost(Fact, frozen=True, kw_only=True, tag="replica_lost.v1"):
    """A node no longer holds a copy that it held; the catalog sends this."""

    owner_slot: Count
    """The slot whose state it was."""
    holder: Name
    """The node that held the copy."""
    reason: str
    """The node is lost, was restarted or ran out of memory, or its copy differs from what was
    saved."""
    step: Count | None = None
    """The step, when only one is lost."""


class ReplicationDegraded(RoundFact, frozen=True, kw_only=True, tag="replication_degraded.v1"):
    """The states in memory survive the loss of fewer nodes than wanted.

    The catalog sends this on the change.
    """

    wanted_losses: Int
    """How many nodes may be lost at once, as configured."""
    survivable_losses: Int
    """How many may be lost now."""
    reason: str
    """Which slots have too few copies, and what is being done."""
    slots: tuple[Int, ...] = ()
    """The slots with too few replicas, at most 100."""
    step: Count | None = None
    """The step whose copies were counted."""


class ReplicationRestored(RoundFact, frozen=True, kw_only=True, tag="replication_restored.v1"):
    """The states in memory survive the loss of as many nodes as wanted; the catalog sends this."""

    survivable_losses: Int
    """How many nodes may be lost now."""
    degraded_s: float
    """How long fewer losses could be survived."""
    copied_bytes: Int = 0
    """How much the repair copied."""
