"""The faults of a job in their order, those with common suspects as one. Pure."""

from collections.abc import Iterable, Sequence
from typing import get_args

import msgspec

from everstep_services.attribution.flight_recorder.ranges import named
from everstep_services.attribution.flight_recorder.report import Fault, Kind, Suspect

_COMMON = 0.55


def _in_common(faults: Iterable[Fault]) -> Iterable[Fault]:
    """The faults; operations that all have joined, and that share ranks, are one fault of these."""
    chains: list[list[Fault]] = []
    for fault in sorted(faults, key=_order):
        if fault.kind != "stuck":
            yield fault
            continue
        ranks = _rank_set(fault)
        linked = [chain for chain in chains if any(ranks & _rank_set(link) for link in chain)]
        chains = [chain for chain in chains if chain not in linked]
        chains.append([*(link for chain in linked for link in chain), fault])
    for chain in chains:
        yield _chained(chain) if len(chain) > 1 else chain[0]


def _chained(stuck: Sequence[Fault]) -> Fault:
    everybody = frozenset[int]().union(*map(_rank_set, stuck))
    common = frozenset.intersection(*map(_rank_set, stuck))
    ranks = sorted(common or everybody)
    are = "is" if len(ranks) == 1 else "are"
    named_ranks = f"{named(ranks)} {are} in all of them: its device or link"
    reason = "is in all the operations that do not end" if common else "is in one of them"
    return Fault(
        kind="stuck",
        summary=f"{len(stuck)} operations do not end though all have joined, and "
        + (named_ranks if common else f"no rank is in all of them: one of {named(ranks)}"),
        confidence=_COMMON if common else min(fault.confidence for fault in stuck),
        suspects=tuple(Suspect(rank=rank, reason=reason) for rank in ranks),
        waiting=tuple(sorted(everybody.union(*(fault.waiting for fault in stuck)) - set(ranks))),
    )


def _rank_set(fault: Fault) -> frozenset[int]:
    return frozenset(suspect.rank for suspect in fault.suspects)


def _order(fault: Fault) -> tuple[float, int, int, list[int], str]:
    """The order of faults, the same in each run."""
    ranks = sorted(_rank_set(fault))
    kind = get_args(Kind).index(fault.kind)
    return (-fault.confidence, -len(fault.waiting), kind, ranks, fault.summary)


def merged(faults: Iterable[Fault]) -> list[Fault]:
    """The faults in their order; those of one kind with a common suspect are one.

    A fault of another kind keeps the suspects that no fault before it has.
    """
    kept: list[Fault] = []
    for fault in sorted(_in_common(faults), key=_order):
        same = next((at for at, other in enumerate(kept) if _is_same(fault, other)), None)
        if same is not None:
            kept[same] = _joined(kept[same], fault)
            continue
        accused = frozenset[int]().union(*map(_rank_set, kept))
        left = tuple(suspect for suspect in fault.suspects if suspect.rank not in accused)
        if left:
            kept.append(msgspec.structs.replace(fault, suspects=left))
    return sorted(kept, key=_order)


def _is_same(fault: Fault, other: Fault) -> bool:
    return fault.kind == other.kind and not _rank_set(fault).isdisjoint(_rank_set(other))


def _joined(fault: Fault, other: Fault) -> Fault:
    suspects = {suspect.rank: suspect for suspect in (*other.suspects, *fault.suspects)}
    return msgspec.structs.replace(
        fault,
        suspects=tuple(suspects[rank] for rank in sorted(suspects)),
        waiting=tuple(sorted({*fault.waiting, *other.waiting} - set(suspects))),
    )
