"""Which step of its slot a node fetches, and from whom. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Age = tuple[int, int, int]
"""As `Identity.age`, with the step at the end: the greater is newer."""


@dataclass(frozen=True, slots=True)
class Offered(Generic[T]):
    """A copy, or a part of one, that another node offers."""

    age: Age
    rank: int
    source: T
    part: int = 0
    parts_needed: int = 1


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """A step that all ranks of the slot can have."""

    age: Age
    from_others: Mapping[int, Sequence[Offered[T]]]
    """For each rank that does not have it here, the offers of it."""


def choices(
    ranks: Collection[int], here: Mapping[int, Collection[Age]], offers: Sequence[Offered[T]]
) -> list[Choice[T]]:
    """The choices worth a fetch, newest first: newer than the newest that all ranks have here."""
    newest = newest_of_all(ranks, here)
    ages = sorted({offer.age for offer in offers}, reverse=True)
    options = []
    for age in ages:
        if newest is not None and age <= newest:
            break
        missing = [rank for rank in ranks if age not in here.get(rank, ())]
        at = {
            rank: [offer for offer in offers if (offer.age, offer.rank) == (age, rank)]
            for rank in missing
        }
        if all(_is_enough(each) for each in at.values()):
            options.append(Choice(age, at))
    return options


def newest_of_all(ranks: Collection[int], here: Mapping[int, Collection[Age]]) -> Age | None:
    """The newest state that each of the ranks has."""
    common = set.intersection(*(set(here.get(rank, ())) for rank in ranks)) if ranks else set()
    return max(common, default=None)


def _is_enough(offers: Sequence[Offered[T]]) -> bool:
    """A whole copy is offered, or as many different parts as are needed."""
    if any(offer.parts_needed == 1 for offer in offers):
        return True
    return bool(offers) and len({offer.part for offer in offers}) >= offers[0].parts_needed
