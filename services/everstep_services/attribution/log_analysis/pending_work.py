"""The collectives in which ranks wait, by what NCCL's watchdog writes when they time out."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_WORK = re.compile(
    r"(?:\[(?P<group>PG [^\]]{1,80}?) ?Rank \d+\].*)?\btimeout: WorkNCCL\("
    r"SeqNum=(?P<number>\d{1,12}), OpType=(?P<kind>\w{1,40})(?:, NumelIn=(?P<size>\d{1,15}))?"
)
_EQUAL = frozenset({
    "ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "ALLGATHER", "_REDUCE_SCATTER_BASE",
    "REDUCE_SCATTER",
})  # fmt: skip
"""Collectives for which all ranks give tensors of one size."""
_OF_TWO = frozenset({"SEND", "RECV", "COALESCED", "UNKNOWN"})
_NEAR = 16
"""So far apart are the numbers of two collectives at most that may be of one group."""
_SURE, _UNSURE = 0.9, 0.6


@dataclass(frozen=True, slots=True)
class PendingWork:
    """A collective that a rank waits in."""

    number: int
    kind: str
    size: int | None = None

    @property
    def words(self) -> str:
        """Its name."""
        size = "" if self.size is None else f" of {self.size} elements"
        return f"{self.kind} {self.number}{size}"


@dataclass(frozen=True, slots=True)
class WorkMismatch:
    """Ranks that wait in different collectives."""

    ranks: tuple[int, ...]
    """Those that differ from most; empty if that is not clear."""
    words: str
    confidence: float


def work_of(text: str) -> tuple[str, PendingWork] | None:
    """The group, as far as it is named, and the work of a line of the watchdog."""
    match = _WORK.search(text)
    if match is None:
        return None
    size = int(match["size"]) if match["size"] else None
    return match["group"] or "", PendingWork(int(match["number"]), match["kind"], size)


def mismatch(works: Mapping[tuple[str, int], PendingWork]) -> WorkMismatch | None:
    """What differs between the ranks of a group; None if nothing does."""
    groups: dict[str, dict[int, PendingWork]] = defaultdict(dict)
    for (group, rank), work in works.items():
        if work.kind not in _OF_TWO:
            groups[group][rank] = work
    for group, of_ranks in sorted(groups.items()):
        differences = [*_of_one_number(of_ranks), *_of_kinds(of_ranks, is_named=bool(group))]
        if differences:
            return differences[0]
    return None


def _of_one_number(works: Mapping[int, PendingWork]) -> Iterator[WorkMismatch]:
    """The same number has another kind, or another size, on another rank."""
    for number in sorted({work.number for work in works.values()}):
        ranks: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        for rank, work in works.items():
            if work.number == number:
                ranks[work.kind, work.size if work.kind in _EQUAL else None].append(rank)
        if len(ranks) > 1:
            yield _told(works, sorted(ranks.values(), key=len), _SURE)


def _of_kinds(works: Mapping[int, PendingWork], *, is_named: bool) -> Iterator[WorkMismatch]:
    """Ranks of one group wait in collectives of several kinds at several numbers."""
    numbers = [work.number for work in works.values()]
    if not is_named and numbers and max(numbers) - min(numbers) > _NEAR:
        return
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, work in works.items():
        ranks[work.kind].append(rank)
    if len(ranks) > 1:
        yield _told(works, sorted(ranks.values(), key=len), _UNSURE)


def _told(
    works: Mapping[int, PendingWork], parts: Sequence[list[int]], confidence: float
) -> WorkMismatch:
    is_clear = len(parts) == 2 and 2 * len(parts[0]) <= len(parts[1])
    words = "; ".join(
        f"{'rank' if len(part) == 1 else 'ranks'} {', '.join(map(str, sorted(part)[:8]))} in "
        f"{works[part[0]].words}"
        for part in parts[:3]
    )
    return WorkMismatch(
        tuple(sorted(parts[0])) if is_clear else (),
        f"ranks wait in different collectives: {words}",
        confidence,
    )
