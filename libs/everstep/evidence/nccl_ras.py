"""What NCCL's RAS says about a job: processes that no longer answer, and ranks out of step. Pure.

NCCL answers on a local port of each node, in words, or as JSON in newer releases. Both tell, for
each communicator, the ranks that are missing, and how many collectives each rank has launched.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

_NAMED_MOST = 8
_OPERATIONS_MOST = 64
"""The limit of the kinds of collectives of a rank: NCCL has a dozen."""
_ROW = re.compile(r"(\d+)(?:\s+\d+){3}\s+(\d+)\s+\d+\s+[A-Z]")
"""A group of communicators: its number, and the ranks of each."""
_BLOCK = re.compile(r"^#(\d+)-\d+ \(\w+\) (\w+)$")
_COUNT = re.compile(r"(\d+) ranks have (?:launched up to operation (\d+)|not launched)")
_RANK = re.compile(
    r"Rank (\d+)(?: has (?:launched up to operation (\d+)|not launched[^-]*))? -- GPU"
)
_WHERE = re.compile(r"process (\d+) on node (\S+)", re.IGNORECASE)


class RasRank(msgspec.Struct, frozen=True):
    """A rank of a communicator."""

    rank: int
    """Its number there; below 0 where only its process is named."""
    host: str = ""
    pid: int = -1
    collective_counts: Mapping[str, int] = {}


class Communicator(msgspec.Struct, frozen=True):
    """A communicator; those that agree are left out of a report in words."""

    size: int
    ranks: Sequence[RasRank] = ()
    missing_ranks: Sequence[RasRank] = ()
    usual: Mapping[str, int] = {}
    """In words, the ranks that agree are only counted: what they have launched."""


class RasReport(msgspec.Struct, frozen=True):
    """The whole answer."""

    communicators: Sequence[Communicator]


class RasFinding(msgspec.Struct, frozen=True):
    """Ranks of a communicator that differ from the others."""

    kind: Literal["silent", "behind", "ahead", "differs"]
    ranks: tuple[RasRank, ...]
    size: int
    """How many ranks the communicator has."""
    says: str
    """What about these ranks, without their numbers."""


_REPORT = msgspec.json.Decoder(RasReport)


def parse(answer: bytes) -> RasReport:
    """Read an answer in either form; `ValueError` if it is neither."""
    if answer.lstrip().startswith(b"{"):
        try:
            report = _REPORT.decode(answer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"its JSON cannot be read: {error}") from error
        ranks = (rank for group in report.communicators for rank in group.ranks)
        if any(len(rank.collective_counts) > _OPERATIONS_MOST for rank in ranks):
            raise ValueError("a rank of it has launched more kinds of collectives than NCCL has")
        return report
    text = answer.decode(errors="replace")
    if "Communicators" not in text:
        raise ValueError(f"it is not a report of NCCL's RAS: {text[:60]!r}")
    return RasReport(tuple(_of_words(text)))


def findings(report: RasReport) -> Iterator[RasFinding]:
    """Who differs, in each communicator."""
    for group in report.communicators:
        if group.missing_ranks:
            ranks = tuple(group.missing_ranks)
            yield RasFinding("silent", ranks, group.size, "stopped answering the other processes")
        elif finding := _out_of_step(group):
            yield finding


def summary(report: RasReport) -> str:
    """The report in a line."""
    count = len(report.communicators)
    differences = [f"{_named(finding.ranks)} {finding.says}" for finding in findings(report)]
    few = "; ".join(differences[:_NAMED_MOST]) or "no rank differs"
    return f"{count} {'communicator' if count == 1 else 'communicators'}: {few}"


def _named(ranks: Sequence[RasRank]) -> str:
    if ranks[0].rank < 0:
        return ", ".join(f"process {rank.pid} on {rank.host}" for rank in ranks[:_NAMED_MOST])
    few = ", ".join(str(rank.rank) for rank in ranks[:_NAMED_MOST])
    more = f" and {len(ranks) - _NAMED_MOST} more" if len(ranks) > _NAMED_MOST else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{more}"


def _out_of_step(group: Communicator) -> RasFinding | None:
    """The ranks that have launched other collectives than most; of two halves, the later one."""
    counts = [tuple(sorted(rank.collective_counts.items())) for rank in group.ranks]
    alike = Counter(counts)
    if group.usual:
        alike[tuple(sorted(group.usual.items()))] += group.size - len(counts)
    if len(alike) < 2:
        return None
    usual = max(alike, key=lambda key: (alike[key], sum(number for _, number in key)))
    others = [
        (rank, dict(key)) for rank, key in zip(group.ranks, counts, strict=True) if key != usual
    ]
    ranks, most = tuple(rank for rank, _ in others), dict(usual)
    names = sorted({name for _, key in others for name in key} | most.keys())
    less = {name for _, key in others for name in names if key.get(name, 0) < most.get(name, 0)}
    more = {name for _, key in others for name in names if key.get(name, 0) > most.get(name, 0)}
    if less and more:
        says = f"launched other collectives than most: {', '.join(sorted(less | more))} differ"
        return RasFinding("differs", ranks, group.size, says)
    name = min(less or more)
    has = others[0][1].get(name, 0)
    says = f"launched {has} {name}, and most of the others {most.get(name, 0)}"
    return RasFinding("behind" if less else "ahead", ranks, group.size, says)


def _of_words(text: str) -> Iterator[Communicator]:
    sizes: dict[str, int] = {}
    blocks: list[tuple[str, list[str]]] = []
    block: list[str] = []
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        if row := _ROW.match(line):
            sizes[row[1]] = int(row[2])
        elif head := _BLOCK.match(line):
            block = []
            if head[2] == "MISMATCH":
                blocks.append((head[1], block))
        elif line:
            block.append(line)
        else:
            block = []  # a block ends with an empty line
    for number, block in blocks:
        yield _of_block(block, sizes.get(number, 0))
    places = (_WHERE.match(line) for line in lines)
    if silent := dict.fromkeys((place[2], int(place[1])) for place in places if place):
        yield Communicator(0, missing_ranks=[RasRank(-1, host, pid) for host, pid in silent])


def _of_block(lines: Sequence[str], size: int) -> Communicator:
    kind = re.search(r"different (\w+) operation", lines[0]) if lines else None
    name = "collectives" if kind is None or kind[1] == "collective" else kind[1]
    ranks: list[RasRank] = []
    usual: Counter[int] = Counter()
    last = 0
    for line in lines:
        if count := _COUNT.match(line):
            last = int(count[2] or 0)
            usual[last] += int(count[1])
        elif (rank := _RANK.match(line)) and (where := _WHERE.search(line)):
            is_alone = " has " in line
            number = int(rank[2] or 0) if is_alone else last
            usual[last] -= not is_alone
            ranks.append(RasRank(int(rank[1]), where[2], int(where[1]), {name: number}))
    most = max(usual, key=lambda number: usual[number], default=0)
    return Communicator(size, tuple(ranks), usual={name: most} if usual[most] > 0 else {})
