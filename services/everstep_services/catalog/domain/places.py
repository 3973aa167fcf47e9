"""The catalog's answer about checkpoints: their state, and from where they can be restored."""

from collections.abc import Iterator, Mapping, Sequence

from everstep.messages import (
    CheckpointPlace,
    Holding,
    KnownCheckpoint,
    Peer,
    RejectedStep,
    ReplicaPlace,
    Seat,
)
from everstep.messages.base import shared
from everstep_services.catalog.domain.index import Index, newest_first, not_committed
from everstep_services.catalog.domain.replication import current, step_held, survivable

_REPLICAS = ("memory", "peer")


def listed(index: Index, most: int, tier: str, seats: Sequence[Seat]) -> Sequence[CheckpointPlace]:
    """All known checkpoints, the newest first."""
    places = [place_of(place) for place in newest_first(index.known.values())]
    in_memory = _in_memory(index, seats)
    if in_memory is not None:
        places.append(in_memory)
    places.sort(key=lambda place: (place.step, place.tier), reverse=True)
    return [place for place in places if not tier or place.tier == tier][:most]


def located(
    index: Index, step: int | None, world_size: int, seats: Sequence[Seat]
) -> tuple[Sequence[CheckpointPlace], Sequence[RejectedStep]]:
    """The checkpoints that can be restored, the newest first; and the others, with the reason."""
    places: list[CheckpointPlace] = []
    rejected: list[RejectedStep] = []
    in_memory = _in_memory(index, seats)
    fits = world_size == index.world_size
    if in_memory is not None and fits and step in (None, in_memory.step):
        places.append(in_memory)
    for checkpoint in newest_first(index.known.values()):
        if step not in (None, checkpoint.step) or checkpoint.tier in _REPLICAS:
            continue
        why = unfit(checkpoint)
        if why:
            rejected.append(
                RejectedStep(
                    step=checkpoint.step, tier=checkpoint.tier, reason=why, path=checkpoint.path
                )
            )
        else:
            places.append(place_of(checkpoint))
    places.sort(key=lambda checkpoint: checkpoint.step, reverse=True)
    return places, rejected


def unfit(checkpoint: KnownCheckpoint) -> str:
    """Why a checkpoint must not be restored; empty if it may be."""
    if checkpoint.quarantined_for:
        return f"quarantined ({checkpoint.quarantined_for}): {checkpoint.quarantine_reason}"
    if checkpoint.missing_since is not None:
        return f"its files are gone from {checkpoint.path}"
    if not checkpoint.is_as_committed:
        return ""  # its files agree with each other, and ranks check no more than that
    return checkpoint.flaw


def place_of(checkpoint: KnownCheckpoint) -> CheckpointPlace:
    """The state of a checkpoint in files."""
    world_size = checkpoint.world_size or None
    return CheckpointPlace(
        **{**shared(CheckpointPlace, checkpoint), "world_size": world_size},
        is_verified=checkpoint.is_good,
        is_pinned=bool(checkpoint.pinned_by),
        is_quarantined=bool(checkpoint.quarantined_for),
        is_suspect=bool(checkpoint.suspected_for),
        is_missing=checkpoint.missing_since is not None,
        note=_note(checkpoint),
    )


def _in_memory(index: Index, seats: Sequence[Seat]) -> CheckpointPlace | None:
    """The state that the nodes of the running round hold together; None if it is incomplete."""
    held = current(index.holdings.values())
    losses, _ = survivable(index.holdings.values(), index.slots)
    step = step_held(held, index.slots)
    if losses is None or step is None:
        return None
    return CheckpointPlace(
        step=step,
        tier="peer" if index.uses_replicas else "memory",
        round=index.round,
        survivable_losses=losses,
        replicas=tuple(_replicas(held, {seat.node: seat for seat in seats})),
        note=_of_memory(index),
    )


def _replicas(
    held: Mapping[int, Sequence[Holding]], seats: Mapping[str, Seat]
) -> Sequence[ReplicaPlace]:
    return [
        ReplicaPlace(slot=slot, holders=tuple(_peers(slot, several, seats)))
        for slot, several in sorted(held.items())
    ]


def _peers(slot: int, held: Sequence[Holding], seats: Mapping[str, Seat]) -> Iterator[Peer]:
    """The holders that take part in the round now, the slot's own node first."""
    here = [seats[holding.holder] for holding in held if holding.holder in seats]
    for seat in sorted(here, key=lambda holding: (holding.slot != slot, holding.node)):
        if seat.slot is not None:
            yield Peer(
                node=seat.node, slot=seat.slot, address=seat.address, port=seat.replica_port or 0
            )


def _note(checkpoint: KnownCheckpoint) -> str:
    texts = [unfit(checkpoint), not_committed(checkpoint)]
    if checkpoint.suspected_for:
        texts.append(f"suspect: {checkpoint.suspected_for}")
    if checkpoint.pinned_by:
        texts.append(f"pinned by {checkpoint.pinned_by}: {checkpoint.pin_reason}")
    return "; ".join(filter(None, texts))


def _of_memory(index: Index) -> str:
    note = "this step or a later one: the catalog does not hear of every save"
    if index.survivable_losses is None:
        return note
    return f"{note}; too few nodes may be lost, and the catalog asks for copies"
