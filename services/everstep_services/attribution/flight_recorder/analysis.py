"""Collects the summaries of the ranks' dumps, and makes their wait graph. Pure."""

from array import array
from collections.abc import Collection, Iterable

import msgspec

from everstep_services.attribution.flight_recorder.faults import FaultFinder
from everstep_services.attribution.flight_recorder.mismatches import CallTexts
from everstep_services.attribution.flight_recorder.ranges import named
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.flight_recorder.summary import (
    GroupRecord,
    RankSummary,
    UnreadableDump,
)
from everstep_services.attribution.flight_recorder.waits import WaitGraph


class FlightAnalysis:
    """Takes summaries one by one, and reports what they show together."""

    def __init__(self, *, world: int | None = None, ended: Collection[int] = ()) -> None:
        """`ended`: ranks that had failed by themselves before the dumps were written."""
        self._world = world
        self._ended = frozenset(ended)
        self._ranks: dict[int, RankSummary] = {}
        self._unreadable: list[UnreadableDump] = []
        self._texts = CallTexts()
        self._bytes: dict[bytes, bytes] = {}

    def add(self, dump: RankSummary | UnreadableDump) -> None:
        if isinstance(dump, UnreadableDump):
            self._unreadable.append(dump)
            return
        if dump.rank in self._ranks:
            reason = "there is another dump of this rank, and only that one is used"
            self._unreadable.append(UnreadableDump(name=f"rank {dump.rank}", reason=reason))
            return
        self._texts.add(dump.texts)
        groups = tuple(self._shared(group) for group in dump.groups)
        self._ranks[dump.rank] = msgspec.structs.replace(dump, texts=(), groups=groups)

    def _shared(self, record: GroupRecord) -> GroupRecord:
        """The record, with members and calls that equal those of other ranks kept once."""
        return msgspec.structs.replace(
            record,
            members=self._bytes.setdefault(record.members, record.members),
            calls=self._bytes.setdefault(record.calls, record.calls),
        )

    def report(self, *, sizes_differ: bool = False) -> FlightReport:
        """Return the report about all summaries so far.

        With `sizes_differ`, gloo has said that tensors do not fit: then a mismatch counts however
        short the wait for it was.
        """
        world = self._world_size()
        unreadable = {dump.rank: dump for dump in self._unreadable if dump.rank is not None}
        graph = WaitGraph(self._ranks, world, self._texts)
        return FaultFinder(graph, world, unreadable, self._ended).report(
            tuple(self._notes()), sizes_differ=sizes_differ
        )

    def _world_size(self) -> int:
        groups = {g.members for rank in self._ranks.values() for g in rank.groups if g.members}
        listed = [max(array("I", members)) for members in groups]
        named_ranks = [dump.rank for dump in self._unreadable if dump.rank is not None]
        seen = max([*listed, *self._ranks, *named_ranks, -1]) + 1
        return max(self._world or 0, seen)

    def _notes(self) -> Iterable[str]:
        for dump in self._unreadable:
            yield f"{dump.name} was left out: {dump.reason}"
        for rank, summary in sorted(self._ranks.items()):
            yield from (f"rank {rank}: {problem}" for problem in summary.problems)
        lost = [rank for rank, record in self._ranks.items() if record.lost]
        if lost:
            yield (
                f"the ring of {named(lost)} was full and lost its oldest entries: differences "
                f"further back cannot be seen; TORCH_FR_BUFFER_SIZE makes it larger"
            )


def with_global_ranks(
    dump: RankSummary | UnreadableDump, group_world: int
) -> RankSummary | UnreadableDump:
    """A dump of torchft whose default group lists the ranks of its replica group, made global.

    A replica group has `group_world` ranks; with 0, the dump is as it was.
    """
    if isinstance(dump, UnreadableDump) or not group_world:
        return dump
    first = dump.rank // group_world * group_world
    groups = tuple(
        msgspec.structs.replace(
            group,
            members=array("I", (rank + first for rank in array("I", group.members))).tobytes(),
        )
        if group.description == "default_pg"
        else group
        for group in dump.groups
    )
    return msgspec.structs.replace(dump, groups=groups)
