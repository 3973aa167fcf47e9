"""Replicas: the states that nodes hold in memory for each other."""

from everstep.messages.base import Count, Fact, Int, Name, RoundFact


class ReplicaStored(RoundFact, frozen=True, kw_only=True, tag="replica_stored.v1"):
    """A node holds another's state, verified.

    The holder's agent sends it when a copy becomes complete for the first time in a round,
    moves, or was repaired: not for each step.
    """

    owner_slot: Count
    """Whose state it is."""
    owner: Name
    """The node that saved it."""
    holder: Name
    """The node that holds it."""
    step: Count
    """The step."""
    size_bytes: Count
    """How much."""
    coding: Name = "mirror"
    """`mirror`, or `erasure`: the holder has one part of several."""
    part: Count = 0
    """Which part."""
    parts_needed: Count = 1
    """How many parts give the state back."""
    hash: str = ""
    """The xxh3-128 of what is held."""
    took_s: float = 0.0
    """From the first byte until it was verified."""


class ReplicaLost(Fact, frozen=True, kw_only=True, tag="replica_lost.v1"):
    """A node no longer holds what it held; the catalog sends it."""

    owner_slot: Count
    """Whose state it was."""
    holder: Name
    """The node that held it."""
    reason: str
    """It is lost, was restarted, ran out of memory, or what it holds is not what was saved."""
    step: Count | None = None
    """The step, when it is about one."""


class ReplicationDegraded(RoundFact, frozen=True, kw_only=True, tag="replication_degraded.v1"):
    """Fewer node losses than wanted can be survived from memory.

    The catalog sends it on the change.
    """

    wanted_losses: Int
    """How many nodes may be lost at once, as configured."""
    survivable_losses: Int
    """How many may be lost now."""
    reason: str
    """Which slots, and what is being done."""
    slots: tuple[Int, ...] = ()
    """The slots with too few replicas, at most 100."""
    step: Count | None = None
    """The step that it is about."""


class ReplicationRestored(RoundFact, frozen=True, kw_only=True, tag="replication_restored.v1"):
    """As many node losses as wanted can be survived again; the catalog sends it."""

    survivable_losses: Int
    """How many nodes may be lost now."""
    degraded_s: float
    """For how long it was otherwise."""
    copied_bytes: Int = 0
    """What the repair moved."""
