"""Chooses the checkpoint that all ranks load. Pure: all ranks choose alike from equal inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from trainer_sdk.checkpoint.manifest import Identity

Tier = Literal["memory", "disk", "peer", "global"]
"""Where a state is kept."""
MEMORY: Final = "memory"
DISK: Final = "disk"
PEER: Final = "peer"
GLOBAL: Final = "global"
NEAREST_FIRST: tuple[Tier, ...] = (MEMORY, DISK, PEER, GLOBAL)


class StateOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A state that a rank could load."""

    identity: Identity
    tier: Tier
    place: str
    """The folder of its image, or the name of the step in the global tier."""


class RejectedState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A state that is not loaded, and why; the fields of the fact `RejectedStep`."""

    step: int
    reason: str
    tier: Tier | Literal[""] = ""
    rank: int | None = None
    path: str = ""
    is_corrupt: bool = False


class JobPast(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The past of a job when a checkpoint was saved; the later, the greater."""

    ran_s: float = 0.0
    """The time that the job had run, in all its rounds."""
    failures: int = 0
    """How often the job had failed by then, in all its launches."""
    restarts: int = 0
    """How often the launch that saved had been restarted."""

    def failures_by(self, restarts: int) -> int:
        """How often the job has failed, if its present launch has been restarted this often.

        A launch that has been restarted less often than the one that saved is another launch.
        """
        is_same = restarts >= self.restarts
        return self.failures + restarts - (self.restarts if is_same else 0)


class Sight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The states that a rank sees in the memory of its node; rank 0 also in the global tier."""

    offers: tuple[StateOffer, ...] = ()
    passed: tuple[RejectedState, ...] = ()
    suspect: tuple[Identity, ...] = ()
    """States that are quarantined on this node: no rank loads an image of them."""
    unsure: str = ""
    """Why other nodes may have states in memory that cannot be fetched; empty if none may."""
    past: JobPast = JobPast()
    """The past of the job when the newest of these states was saved."""
    failed_at: tuple[int, ...] = ()
    """Steps whose loss led to a quarantine."""
    committed: int | None = None
    """The step that was committed last in the global tier, as this node knows."""
    is_vacant: bool = False
    """Nothing is in the global tier, not even the name of its job; only rank 0 looks."""

    def with_passed(self, step: int, tier: Tier, rank: int, reason: str) -> "Sight":
        """The same, with a rejected state."""
        more = RejectedState(step=step, tier=tier, rank=rank, reason=reason)
        return msgspec.structs.replace(self, passed=(*self.passed, more))

    def with_more(self, other: "Sight") -> "Sight":
        """Both together."""
        return Sight(
            offers=(*self.offers, *other.offers),
            passed=(*self.passed, *other.passed),
            suspect=(*self.suspect, *other.suspect),
            failed_at=(*self.failed_at, *other.failed_at),
            past=max(self.past, other.past),
            unsure=self.unsure or other.unsure,
            committed=other.committed if self.committed is None else self.committed,
            is_vacant=self.is_vacant or other.is_vacant,
        )


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """A state for all ranks, and the offer from which each rank loads it."""

    identity: Identity
    offers: tuple[StateOffer, ...]

    @property
    def published(self) -> tuple[StateOffer, ...]:
        """The offer of the global tier, if a rank loads from it: all ranks verify it together."""
        return tuple({offer for offer in self.offers if offer.tier == GLOBAL})


@dataclass(frozen=True, slots=True)
class StateOffers:
    """All states that ranks could load."""

    images: tuple[tuple[StateOffer, ...], ...]
    """The offers of each rank."""
    published: tuple[StateOffer, ...]
    """The offers of the global tier, for all ranks."""

    @classmethod
    def of(
        cls, sights: Sequence[Sight], step: int | None = None, before: int | None = None
    ) -> "StateOffers":
        """The offers of all ranks, without quarantined images; of one step, or below one."""
        suspect = {identity for sight in sights for identity in sight.suspect}

        def chosen(sight: Sight, *, is_global: bool) -> tuple[StateOffer, ...]:
            return tuple(
                offer
                for offer in sight.offers
                if (offer.tier == GLOBAL) == is_global
                and (is_global or offer.identity not in suspect)
                and step in (None, offer.identity.step)
                and (before is None or offer.identity.step < before)
            )

        return cls(
            tuple(chosen(sight, is_global=False) for sight in sights),
            tuple(offer for sight in sights for offer in chosen(sight, is_global=True)),
        )

    @property
    def is_empty(self) -> bool:
        """No offer is left."""
        return not self.published and not any(self.images)

    def with_published(self, more: Sequence[StateOffer]) -> "StateOffers":
        """The same, with older ones of the global tier."""
        return replace(self, published=(*self.published, *more))

    def without(self, passed: Sequence[tuple[int, StateOffer]]) -> "StateOffers":
        """The same without offers that failed on these ranks; a global one goes for all ranks."""
        gone = set(passed)
        lost = {offer for _, offer in passed if offer.tier == GLOBAL}
        return StateOffers(
            tuple(
                tuple(offer for offer in own if (rank, offer) not in gone)
                for rank, own in enumerate(self.images)
            ),
            tuple(offer for offer in self.published if offer not in lost),
        )

    def of_layout(self, layout: str) -> tuple["StateOffers", list[RejectedState]]:
        """The same without images of other layouts, and the rejected ones."""
        return self._without_images(lambda offer: offer.identity.layout != layout)

    def without_images_of(self, identity: Identity) -> tuple["StateOffers", list[RejectedState]]:
        """The same without images of this state, whose layout is another, and the rejected ones."""
        return self._without_images(lambda offer: offer.identity == identity)

    def _without_images(
        self, is_other: Callable[[StateOffer], bool]
    ) -> tuple["StateOffers", list[RejectedState]]:
        others = [
            (rank, offer)
            for rank, own in enumerate(self.images)
            for offer in own
            if is_other(offer)
        ]
        reason = "it was saved with other tensors, or with tensors that were sharded otherwise"
        passed = [
            RejectedState(step=offer.identity.step, tier=offer.tier, rank=rank, reason=reason)
            for rank, offer in others
        ]
        return self.without(others), passed

    def newest_first(self) -> Iterator[Identity]:
        """All states that some rank has, newest first; of one step, the latest round first."""
        identities = {offer.identity for own in (*self.images, self.published) for offer in own}
        return iter(
            sorted(
                identities,
                key=lambda identity: (identity.step, *identity.course, identity.layout),
                reverse=True,
            )
        )


def choose(field: StateOffers) -> RestoreChoice | None:
    """The newest state that every rank has; each rank loads it from its nearest tier."""
    for identity in field.newest_first():
        offers = [_nearest(own, field.published, identity) for own in field.images]
        if None not in offers:
            return RestoreChoice(identity, tuple(offer for offer in offers if offer is not None))
    return None


def missing(field: StateOffers, chosen: RestoreChoice | None) -> list[RejectedState]:
    """The newer states that were not chosen, as some rank lacks them."""
    rejected = []
    for identity in field.newest_first():
        if chosen is not None and identity.step <= chosen.identity.step:
            break
        without = [
            rank
            for rank, own in enumerate(field.images)
            if _nearest(own, field.published, identity) is None
        ]
        if without:
            rejected.append(_incomplete(identity, without, len(field.images)))
    return rejected


def _incomplete(identity: Identity, without: Sequence[int], world_size: int) -> RejectedState:
    named = ", ".join(map(str, without[:8])) + (" …" if len(without) > 8 else "")
    has = "has" if len(without) == 1 else "have"
    there = world_size - len(without)
    return RejectedState(
        step=identity.step,
        tier=MEMORY,
        rank=without[0],
        reason=f"rank {named} {has} nothing of it, as saved in round {identity.round}; "
        f"{there} of {world_size} ranks have",
    )


def _nearest(
    own: Sequence[StateOffer], published: Sequence[StateOffer], wanted: Identity
) -> StateOffer | None:
    fitting = [offer for offer in (*own, *published) if offer.identity == wanted]
    return min(fitting, key=lambda offer: NEAREST_FIRST.index(offer.tier), default=None)
