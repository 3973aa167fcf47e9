"""Ranks agree on the state that all continue from, and on where each of them takes it. Pure.

All ranks of a new round know what each of them holds, and come to the same plan. A state is the
same on all ranks with the same place. So a state counts if every place has a rank that holds it
whole, and the newest such state is the plan. If none is near the newest step, images are restored.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

Origin = Literal["own", "rank", "image", "fresh"]
OWN: Final = "own"
IMAGE: Final = "image"
FRESH: Final = "fresh"
Source = Literal["own", "image", "fresh"] | int
"""Its own memory, a rank, an image in a tier of checkpoints, or a new beginning."""
StateMark = tuple[int, int]
"""The round in which a step was made or loaded, and the step; a later state is the greater."""

_MOST_DONORS = 2
"""From how many ranks a rank tries to copy before images are restored."""
_NAMED = 8


class RankHolding(msgspec.Struct, frozen=True):
    """What a rank holds, as ranks tell each other at the beginning of a round."""

    rank: int
    place: str
    """Which part of the state it is: equal places hold equal bytes."""
    step: int | None = None
    """The last step in it; None for a new process."""
    is_torn: bool = False
    """An optimizer or a copy has changed a part of it, and was not finished."""
    images: tuple[int, ...] = ()
    """The steps whose images this rank can load."""
    node: str = ""
    made_in: int = 0
    """The round in which the step was made or loaded: a state of a former round is not the same."""
    avoids: tuple[int, ...] = ()
    """Ranks from which it has got wrong bytes."""

    @property
    def mark(self) -> StateMark | None:
        """The state that is in this rank, whole or torn; None if there is none."""
        return None if self.step is None else (self.made_in, self.step)

    @property
    def whole(self) -> StateMark | None:
        """The state that others may copy from this rank."""
        return None if self.is_torn else self.mark


@dataclass(frozen=True, slots=True)
class HealPlan:
    """The same on all ranks."""

    step: int | None
    """None for a new beginning."""
    sources: Mapping[int, Source]
    """Where each rank takes its state."""
    reason: str
    made_in: int = 0
    """The round in which the state was made; 0 unless ranks hold it."""
    witnesses: Mapping[int, int] = field(default_factory=dict)
    """Ranks that hold what a donor holds, by the donor: their hashes are compared."""

    @property
    def is_live(self) -> bool:
        """Whether the state comes from the memory of ranks."""
        return any(source == OWN for source in self.sources.values())

    @property
    def copies(self) -> dict[int, list[int]]:
        """The ranks that copy, in ascending order, by the rank that they copy from."""
        receivers: defaultdict[int, list[int]] = defaultdict(list)
        for rank, source in sorted(self.sources.items()):
            if isinstance(source, int):
                receivers[source].append(rank)
        return dict(receivers)


class CopyResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the copies in which a rank took part."""

    error: str = ""
    equal: str = ""
    """The hash of what is equal on all ranks of a place: parameters, and states of optimizers."""
    rest: str = ""
    """The hash of all else that was copied."""


def needs_images(holdings: Sequence[RankHolding]) -> bool:
    """Whether ranks must know of images before they agree: no state near the newest is complete."""
    live = _newest_complete(holdings)
    return live is None or not _is_near(live[0], holdings)


def agree(holdings: Sequence[RankHolding]) -> HealPlan:
    """The plan for these ranks; `images` counts only if `needs_images`."""
    live = _newest_complete(holdings)
    if live is not None and _is_near(live[0], holdings):
        return _live_plan(holdings, *live)
    image = _newest_image(holdings)
    if image is not None:
        reason = f"step {image} is the newest image; {_why_not_live(holdings)}"
        return HealPlan(image, {holding.rank: IMAGE for holding in holdings}, reason)
    if live is not None:
        return _live_plan(holdings, *live)
    reason = f"there is no image; {_why_not_live(holdings)}"
    return HealPlan(None, {holding.rank: FRESH for holding in holdings}, reason)


def failed_copies(plan: HealPlan, results: Sequence[CopyResult]) -> dict[int, str]:
    """The ranks whose copies failed, each with the reason; `results` are in the order of ranks."""
    failed: dict[int, str] = {}
    for donor, receivers in plan.copies.items():
        for receiver in receivers:
            given, taken = results[donor], results[receiver]
            if given.error or taken.error:
                failed[receiver] = taken.error or f"rank {donor}: {given.error}"
            elif (given.equal, given.rest) != (taken.equal, taken.rest):
                failed[receiver] = f"the hash of what it got from rank {donor} is wrong"
    return failed


def unequal_replicas(plan: HealPlan, results: Sequence[CopyResult]) -> str:
    """Which ranks should hold the same, and do not; empty if all that were compared do."""
    pairs = [
        f"{donor} and {witness}"
        for donor, witness in plan.witnesses.items()
        if not (results[donor].error or results[witness].error)
        and results[donor].equal != results[witness].equal
    ]
    return ", ".join(pairs)


def after_failures(
    holdings: Sequence[RankHolding], plan: HealPlan, failed: Mapping[int, str]
) -> list[RankHolding]:
    """What ranks hold after these copies failed, for another plan; the other copies are there."""
    after = []
    for holding in holdings:
        source = plan.sources[holding.rank]
        changes: dict[str, object] = {}
        if holding.rank in failed:
            changes = {"is_torn": True, "avoids": (*holding.avoids, source)}
        elif isinstance(source, int):
            changes = {"is_torn": False, "step": plan.step, "made_in": plan.made_in}
        after.append(msgspec.structs.replace(holding, **changes))
    return after


def _newest_complete(
    holdings: Sequence[RankHolding],
) -> tuple[StateMark, dict[int, Source]] | None:
    """The newest state that all ranks hold or can copy, and the source of each."""
    for mark in sorted({each.whole for each in holdings if each.whole is not None}, reverse=True):
        sources = _sources(holdings, mark)
        if sources is not None:
            return mark, sources
    return None


def _sources(holdings: Sequence[RankHolding], mark: StateMark) -> dict[int, Source] | None:
    """Where each rank takes this state; None if a rank can take it from nowhere."""
    holders: defaultdict[str, list[RankHolding]] = defaultdict(list)
    for holding in holdings:
        if holding.whole == mark:
            holders[holding.place].append(holding)
    sources: dict[int, Source] = {}
    loads = dict.fromkeys((holding.rank for holding in holdings), 0)
    for holding in holdings:
        if holding.whole == mark:
            sources[holding.rank] = OWN
            continue
        donor = _donor(holding, holders[holding.place], loads)
        if donor is None:
            return None
        loads[donor] += 1
        sources[holding.rank] = donor
    return sources


def _donor(
    holding: RankHolding, holders: Sequence[RankHolding], loads: Mapping[int, int]
) -> int | None:
    """The nearest rank to copy from; of those as near, the one that fewest ranks copy from."""
    if len(holding.avoids) >= _MOST_DONORS:
        return None
    donors = (each for each in holders if each.rank not in holding.avoids)
    nearest = min(
        donors,
        key=lambda each: (each.node != holding.node, loads[each.rank], each.rank),
        default=None,
    )
    return None if nearest is None else nearest.rank


def _is_near(mark: StateMark, holdings: Sequence[RankHolding]) -> bool:
    """Whether no rank is more than a step ahead, as none is unless all other holders are lost."""
    newest = max(each.mark for each in holdings if each.mark is not None)
    ahead = newest[1] - mark[1]
    return ahead in (0, 1) if newest[0] == mark[0] else ahead == 1


def _newest_image(holdings: Sequence[RankHolding]) -> int | None:
    """The newest step whose image every rank can load."""
    common = set.intersection(*(set(holding.images) for holding in holdings))
    return max(common, default=None)


def _live_plan(
    holdings: Sequence[RankHolding], mark: StateMark, sources: Mapping[int, Source]
) -> HealPlan:
    made_in, step = mark
    owners: defaultdict[str, list[int]] = defaultdict(list)
    for holding in holdings:
        if sources[holding.rank] == OWN:
            owners[holding.place].append(holding.rank)
    place_of = {holding.rank: holding.place for holding in holdings}
    witnesses = {
        donor: next(rank for rank in owners[place_of[donor]] if rank != donor)
        for donor in sources.values()
        # The first step makes replicas equal where each rank has built other values.
        if isinstance(donor, int) and step and len(owners[place_of[donor]]) > 1
    }
    return HealPlan(step, dict(sources), _why_live(step, sources), made_in, witnesses)


def _why_live(step: int, sources: Mapping[int, Source]) -> str:
    kept = sum(source == OWN for source in sources.values())
    copies = [f"{rank} from {donor}" for rank, donor in sources.items() if donor != OWN]
    text = f"step {step} is the newest that all ranks can have; {kept} ranks keep their state"
    if not copies:
        return text
    more = f" and {len(copies) - _NAMED} more" if len(copies) > _NAMED else ""
    return f"{text}, and others copy it: rank {', '.join(copies[:_NAMED])}{more}"


def _why_not_live(holdings: Sequence[RankHolding]) -> str:
    """Why the ranks' memory does not have a whole state, as text."""
    if all(holding.step is None for holding in holdings):
        return "all processes are new"
    newest = max(each.mark for each in holdings if each.mark is not None)
    return "; ".join(_lacks(holdings, newest)) or "whole states are older than the newest step"


def _lacks(holdings: Sequence[RankHolding], newest: StateMark) -> Iterator[str]:
    of_place: defaultdict[str, list[RankHolding]] = defaultdict(list)
    for holding in holdings:
        of_place[holding.place].append(holding)
    tries = [holding.rank for holding in holdings if len(holding.avoids) >= _MOST_DONORS]
    if tries:
        yield f"rank {tries[0]} could not copy the state from {_MOST_DONORS} ranks"
    lost = [
        [holding.rank for holding in same]
        for same in of_place.values()
        if not any(_has_reached(holding, newest) for holding in same)
    ]
    for ranks in lost[:_NAMED]:
        named = ", ".join(map(str, ranks[:_NAMED]))
        yield f"rank {named} lost a part of the state that no other rank has"


def _has_reached(holding: RankHolding, newest: StateMark) -> bool:
    return holding.whole is not None and newest[1] - holding.whole[1] <= 1
