"""A job's rounds as rendezvous knows them: an agent may claim any round, and any slot in it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.messages import Member, NodeTimings, RoundDocument

NOT_FORMED = "round not formed"
_ROUNDS_KEPT = 2
"""Windows of a round may come when the next one has formed."""


@dataclass(frozen=True, slots=True)
class _Seating:
    """A round that has formed: which node has which slot."""

    world: int
    places: Mapping[int, Member]

    def objection(self, timings: NodeTimings) -> str:
        """Why a window cannot be one of this round; empty if it can."""
        place = self.places.get(timings.slot)
        if place is None or place.node != timings.node:
            return "node without that slot"
        if (timings.slots, timings.world) != (len(self.places), self.world):
            return "another world"
        ranks = range(place.first_rank, place.first_rank + place.ranks)
        return "" if all(rank.rank in ranks for rank in timings.ranks) else "rank of another node"


class FormedRound:
    """The newest rounds of a job."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """None where rendezvous knows nothing of the job: another launcher has started it."""
        self.read_at = -math.inf
        self.is_outdated = False
        """Whether a message named an unknown round, so that the document must be read again."""
        self._seatings: dict[int, _Seating] = {}

    def see(self, document: RoundDocument | None, now: float) -> None:
        """Take the document of rendezvous."""
        self.newest, self.read_at = None if document is None else document.round, now
        if document is None:
            self._seatings = {}
            return
        seating = _seating(document)
        if seating is not None:
            self._seatings[document.round] = seating
            kept = sorted(self._seatings)[-_ROUNDS_KEPT:]
            self._seatings = {number: self._seatings[number] for number in kept}

    def is_before(self, round_: int) -> bool:
        """Whether that round has not formed, as far as is known."""
        return self.newest is not None and round_ > self.newest

    def has_seat(self, round_: int, node: str) -> bool:
        """Whether a node has a slot in a round that is known."""
        seating = self._seatings.get(round_)
        return seating is not None and any(seat.node == node for seat in seating.places.values())

    def objection(self, timings: NodeTimings) -> str:
        """Why a window cannot be of a node of the job; empty if it can."""
        if self.newest is None:
            return ""
        seating = self._seatings.get(timings.round)
        if seating is not None:
            return seating.objection(timings)
        if timings.round < self.newest:
            return "stale round"
        self.is_outdated = True
        return NOT_FORMED


def _seating(document: RoundDocument) -> _Seating | None:
    """None while the slots are not given."""
    members = document.members
    return (
        _Seating(document.world_size, {member.slot: member for member in members})
        if members
        else None
    )
