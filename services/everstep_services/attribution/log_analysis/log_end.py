"""How logs end: which ranks fell silent first, and whether a log stops within its work."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.attempts import Position, position_of
from everstep_services.attribution.log_analysis.origins import OF_SLURM, Origin, of_line

_MOST_BYTES = 512 << 10
"""As much of the end of a file is looked at …"""
_LEAST_BYTES = 16 << 10
_ALL_BYTES = 32 << 20
"""… and as much of all files together, but the least of each."""
_LEAST_RANKS = 3
_SILENT_S = 300.0
_STEPS_OF_SILENCE = 10
_ZONE_S, _NEAR_ZONE_S = 900.0, 30.0
"""Clocks of two programs may differ by time zones: multiples of a quarter of an hour."""
_LEAST_SEEN = 3
_MOST_LAST = 400
_QUOTED = 400
_MOST_BETWEEN = 50
_RANK = re.compile(r"(?i)\b(?:global[_ ])?rank[ _=:#]{0,3}(\d{1,7})\b[\]:,]?")
_TIMES = re.compile(r"\d{2,4}[-/:]\d\d[-/:]\d\d(?:[T _]\d\d:\d\d:\d\d)?(?:[.,]\d+)?|\b\d+\.\d+\S*")
_PART = re.compile(
    r"(?i)(?:iter(?:ation)?|step|epoch|batch)s?\W{0,12}(\d{1,12})\s{0,4}/\s{0,12}(\d{1,12})"
)
_BRACKET = re.compile(r"\[\s{0,8}(\d{1,12})/\s{0,8}(\d{1,12})\b")
_BEGINS = re.compile(
    r"(?i)(?:^|[\]:|>)-] {1,4})(?:before|starting|beginning|initiali[sz]ing|loading|waiting for"
    r"|entering|compiling|building|preparing|launching|about to)\b"
    r"(?!.*\b(?:done|finished|complete|ended|took)\b)"
)
_ENDS = re.compile(
    r"(?i)\b(?:complete[ds]?|finish\w*|done|saved|saving|exit\w*|total|elapsed|stop(?:s|ped|ping)?|success\w*|best"
    r"|test|eval\w*|valid\w*|reached|ended|bye|summary|shut\w*)\b"
)


@dataclass(slots=True)
class Tail:
    """The last lines of a file."""

    file: Origin
    lines: Sequence[tuple[int, bytes]]
    is_whole: bool = False
    """Whether these are all lines of the file."""


class Tails:
    """The last lines of all files."""

    def __init__(self) -> None:
        self._tails: list[Tail] = []
        self._bytes = 0

    @property
    def size(self) -> int:
        """How much of the end of the next file is kept."""
        return max(_LEAST_BYTES, min(_MOST_BYTES, (_ALL_BYTES - self._bytes) // 16))

    def add(self, file: Origin, lines: Sequence[tuple[int, bytes]], is_whole: bool) -> None:
        """Take the last lines of a file."""
        self._tails.append(Tail(file, lines, is_whole))
        self._bytes += sum(len(content) for _, content in lines)

    def unfinished(self) -> list[str]:
        """What the files had begun when they stop, in words."""
        return [text for tail in self._tails if (text := unfinished(tail))]

    def hang(self, end: tuple[int, int], text: str, year: int, *, of_all: bool) -> "Hang | None":
        """The silence before the line `end` (its file and number), if any.

        Other files count only if `of_all`: they may tell what came after that line.
        """
        tails = [tail for tail in self._tails if of_all or tail.file.file == end[0]]
        return hang(tails, end, text, year)


@dataclass(frozen=True, slots=True)
class Hang:
    """A training that stood still before something from outside ended it."""

    ranks: tuple[int, ...] = ()
    """Those that fell silent first."""
    line: str = ""
    """A line that all others wrote after that."""
    others: int = 0
    silent_s: float | None = None
    """From the last line of any rank to the end."""

    @property
    def words(self) -> str:
        """The finding."""
        parts = []
        if self.ranks:
            who = (
                f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {_listed(self.ranks)}"
            )
            parts.append(f"{who} fell silent first: {self.others} others wrote a line after that")
        if self.silent_s is not None:
            parts.append(f"no rank wrote anything in the last {_duration(self.silent_s)}")
        return f"the training stood still: {'; '.join(parts)}"


@dataclass(slots=True)
class _Line:
    """A line that several ranks write."""

    ranks: set[int] = field(default_factory=set)
    last: tuple[int, int] = (0, 0)
    text: str = ""


def hang(tails: Iterable[Tail], end: tuple[int, int], end_text: str, year: int) -> Hang | None:
    """The silence before the line `end` (its file and number) that ended the training, if any."""
    lines, seen, steps, last = _by_rank(tails, end, year)
    silent = _silent_first(lines, seen)
    ended_at = clocks.seconds(end_text, year)
    gap = ended_at - last if last is not None and ended_at is not None else None
    times = sorted(steps.values())
    usual = median([later - earlier for earlier, later in pairwise(times)] or [0.0])
    least = max(_SILENT_S, _STEPS_OF_SILENCE * usual)
    if gap is not None and gap < least:
        return None  # the ranks worked until then
    if silent is not None and (gap is not None or _is_near(silent[1].last, end, len(seen))):
        ranks, line = silent
        return Hang(ranks, line.text, len(line.ranks), gap)
    if gap is None or len(steps) < _LEAST_SEEN:
        return None  # who counts no steps may work without a word
    is_zone = min(gap % _ZONE_S, -gap % _ZONE_S) < _NEAR_ZONE_S
    return None if is_zone else Hang(silent_s=gap)


def _is_near(place: tuple[int, int], end: tuple[int, int], ranks: int) -> bool:
    """Whether few lines lie between: where no times tell that the ranks went on."""
    return place[0] != end[0] or end[1] - place[1] < _MOST_BETWEEN + 2 * ranks


def _by_rank(
    tails: Iterable[Tail], end: tuple[int, int], year: int
) -> tuple[
    dict[tuple[str, int], _Line], dict[int, tuple[int, int]], dict[Position, float], float | None
]:
    """The lines before the end with their ranks, the last line of each rank, and times.

    Those are of the first line of each step, and of the last line of all.
    """
    lines: dict[tuple[str, int], _Line] = defaultdict(_Line)
    seen: dict[int, tuple[int, int]] = {}
    steps: dict[Position, float] = {}
    latest: float | None = None
    for tail in tails:
        counts: dict[tuple[int, str], int] = defaultdict(int)
        for number, content in tail.lines:
            place = (tail.file.file, number)
            whole = content.decode("utf-8", "replace")
            origin, text = of_line(whole, tail.file)
            rank = _rank_of(origin, text)
            if (place[0] == end[0] and number >= end[1]) or text.startswith(OF_SLURM):
                continue
            at = clocks.seconds(whole, year)
            if at is not None:
                latest = max(at, latest or at)
                if (position := position_of(text)) is not None:
                    steps.setdefault(position, at)
            if rank is None:
                continue
            seen[rank] = max(place, seen.get(rank, place))
            name = " ".join(_TIMES.sub("", _RANK.sub("", text)).split())
            turn = counts[rank, name] if tail.is_whole else 0
            counts[rank, name] += 1
            line = lines[name, turn]
            line.ranks.add(rank)
            line.last, line.text = place, text.strip()[:_QUOTED]
    return lines, seen, steps, latest


def _silent_first(
    lines: dict[tuple[str, int], _Line], seen: dict[int, tuple[int, int]]
) -> tuple[tuple[int, ...], _Line] | None:
    """The ranks without the first line that all others wrote, and nothing after it."""
    if len(seen) < _LEAST_RANKS:
        return None
    few = max(2, len(seen) // 4)
    for line in sorted(lines.values(), key=lambda line: line.last):
        silent = seen.keys() - line.ranks
        is_common = len(line.ranks) > len(seen) // 2 and 1 <= len(silent) <= few
        if is_common and all(seen[rank] < line.last for rank in silent):
            return tuple(sorted(silent)), line
    return None


def _rank_of(origin: Origin, text: str) -> int | None:
    if origin.rank is not None:
        return origin.rank
    if origin.member.startswith("task "):
        return int(origin.member.removeprefix("task "))
    named = _RANK.search(text)
    return int(named[1]) if named else None


def unfinished(tail: Tail) -> str:
    """What the last lines of a file had begun, in words; empty if nothing tells of it."""
    texts = [
        text
        for _, content in tail.lines[-_MOST_LAST:]
        if (text := of_line(content.decode("utf-8", "replace"), tail.file)[1].strip())
    ]
    if not texts or _ENDS.search(texts[-1]):
        return ""
    if _BEGINS.search(texts[-1]):
        return f"the last line begins something: {texts[-1][:120]}"
    return _part_way(texts) or _mid_step(texts)


def _part_way(texts: Sequence[str]) -> str:
    """The last count of a total that was not reached, where no line after it reports an end."""
    for text in reversed(texts):
        if part := _PART.search(text) or _BRACKET.search(text):
            has_more = int(part[1]) < int(part[2])
            return f"the last line about progress counts {part[1]} of {part[2]}" if has_more else ""
        if _ENDS.search(text):
            return ""
    return ""


def _mid_step(texts: Sequence[str]) -> str:
    """Whether the last line was always followed by another one in the same step."""
    followed: list[str] = []
    now: Position | None = None
    last = _name(texts[-1])
    for text, following in pairwise(texts):
        now = position_of(text) or now
        if _name(text) != last:
            continue
        position = position_of(following)
        if position is not None and position != now:
            return ""  # it ends a step
        followed.append(_name(following))
    if len(followed) < _LEAST_SEEN or len(set(followed)) > 1 or followed[0] == last:
        return ""
    return f"each time but the last, another line of the step followed this one: {texts[-1][:120]}"


def _name(text: str) -> str:
    return re.sub(r"[\d.+-]+", "", text)


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
