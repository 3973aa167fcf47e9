"""Which checkpoint all ranks load. Pure: every rank decides it from the same words, alike."""

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
    """A checkpoint that is passed over, and why; the words of the fact `RejectedStep`."""

    step: int
    reason: str
    tier: Tier | Literal[""] = ""
    rank: int | None = None
    path: str = ""
    is_corrupt: bool = False


class JobPast(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """What a job had been through when a checkpoint was saved; the later, the greater."""

    ran_s: float = 0.0
    """For how long it had been running, in all its rounds."""
    failures: int = 0
    """How often it had failed by then, in all its launches."""
    restarts: int = 0
    """And how often in the one that saved."""

    def failures_by(self, restarts: int) -> int:
        """How often it has failed, when its present launch has been restarted so often.

        A launch that has been restarted less often than that one is another one.
        """
        is_same = restarts >= self.restarts
        return self.failures + restarts - (self.restarts if is_same else 0)


class Sight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank sees in the memory of its node, and the first one in the global tier."""

    offers: tuple[StateOffer, ...] = ()
    passed: tuple[RejectedState, ...] = ()
    suspect: tuple[Identity, ...] = ()
    """Quarantined on this node: no rank loads an image of it."""
    unsure: str = ""
    """Why there may be more in the memory of other nodes than anybody can have."""
    past: JobPast = JobPast()
    """Of the job, when the newest of these was saved."""
    failed_at: tuple[int, ...] = ()
    """Steps at which the loss failed, which led to a quarantine."""

    def with_passed(self, step: int, tier: Tier, rank: int, reason: str) -> "Sight":
        """The same, and something that is passed over."""
        more = RejectedState(step=step, tier=tier, rank=rank, reason=reason)
        return msgspec.structs.replace(self, passed=(*self.passed, more))

    def with_more(self, other: "Sight") -> "Sight":
        """Both."""
        return Sight(
            offers=(*self.offers, *other.offers),
            passed=(*self.passed, *other.passed),
            suspect=(*self.suspect, *other.suspect),
            failed_at=(*self.failed_at, *other.failed_at),
            past=max(self.past, other.past),
            unsure=self.unsure or other.unsure,
        )


@dataclass(frozen=True, slots=True)
class RestoreChoice:
    """One state for all ranks, and where each has it from."""

    identity: Identity
    offers: tuple[StateOffer, ...]

    @property
    def published(self) -> tuple[StateOffer, ...]:
        """What some rank loads from the global tier, if so: all ranks verify it together."""
        return tuple({one for one in self.offers if one.tier == GLOBAL})


@dataclass(frozen=True, slots=True)
class Offers:
    """Everything that there is to choose from."""

    images: tuple[tuple[StateOffer, ...], ...]
    """Those of each rank."""
    published: tuple[StateOffer, ...]
    """The global tier's, for all ranks."""

    @classmethod
    def of(cls, sights: Sequence[Sight], step: int | None = None) -> "Offers":
        """What all ranks see, or of one step, without images that are under suspicion."""
        suspect = {one for sight in sights for one in sight.suspect}

        def chosen(sight: Sight, *, is_global: bool) -> tuple[StateOffer, ...]:
            return tuple(
                one
                for one in sight.offers
                if (one.tier == GLOBAL) == is_global
                and (is_global or one.identity not in suspect)
                and step in (None, one.identity.step)
            )

        return cls(
            tuple(chosen(sight, is_global=False) for sight in sights),
            tuple(one for sight in sights for one in chosen(sight, is_global=True)),
        )

    @property
    def is_empty(self) -> bool:
        """There is nothing left."""
        return not self.published and not any(self.images)

    def with_published(self, more: Sequence[StateOffer]) -> "Offers":
        """The same, and older ones of the global tier."""
        return replace(self, published=(*self.published, *more))

    def without(self, passed: Sequence[tuple[int, StateOffer]]) -> "Offers":
        """The same without what these ranks could not have; what is global, no rank can have."""
        gone = set(passed)
        lost = {one for _, one in passed if one.tier == GLOBAL}
        return Offers(
            tuple(
                tuple(one for one in own if (rank, one) not in gone)
                for rank, own in enumerate(self.images)
            ),
            tuple(one for one in self.published if one not in lost),
        )

    def of_layout(self, layout: str) -> tuple["Offers", list[RejectedState]]:
        """The same without images of other layouts, and what those were."""
        return self._without_images(lambda one: one.identity.layout != layout)

    def without_images_of(self, identity: Identity) -> tuple["Offers", list[RejectedState]]:
        """The same without images of a state whose layout is another, and what those were."""
        return self._without_images(lambda one: one.identity == identity)

    def _without_images(
        self, is_other: Callable[[StateOffer], bool]
    ) -> tuple["Offers", list[RejectedState]]:
        others = [
            (rank, one) for rank, own in enumerate(self.images) for one in own if is_other(one)
        ]
        reason = "it was saved with other tensors, or with tensors that were sharded otherwise"
        passed = [
            RejectedState(step=one.identity.step, tier=one.tier, rank=rank, reason=reason)
            for rank, one in others
        ]
        return self.without(others), passed

    def newest_first(self) -> Iterator[Identity]:
        """All states of which somebody has something; of one step, that of the latest round."""
        found = {one.identity for own in (*self.images, self.published) for one in own}
        return iter(sorted(found, key=lambda one: (one.step, one.round, one.layout), reverse=True))


def choose(field: Offers) -> RestoreChoice | None:
    """The newest state that every rank can have, each from its nearest tier."""
    for identity in field.newest_first():
        offers = [_nearest(own, field.published, identity) for own in field.images]
        if None not in offers:
            return RestoreChoice(identity, tuple(one for one in offers if one is not None))
    return None


def missing(field: Offers, chosen: RestoreChoice | None) -> list[RejectedState]:
    """The newer states that were not chosen, as not every rank has them."""
    found = []
    for identity in field.newest_first():
        if chosen is not None and identity.step <= chosen.identity.step:
            break
        without = [
            rank
            for rank, own in enumerate(field.images)
            if _nearest(own, field.published, identity) is None
        ]
        if without:
            found.append(_incomplete(identity, without, len(field.images)))
    return found


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
    fitting = [one for one in (*own, *published) if one.identity == wanted]
    return min(fitting, key=lambda one: NEAREST_FIRST.index(one.tier), default=None)
