"""Who stopped first when ranks of a round stall, and who merely waits for them."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from everstep.messages import NodeBeat, RankBeat, RankRecovered, RankStalled

_TOGETHER_S = 0.25
"""Beats travel: ranks that stopped this close to each other may have stopped in any order."""
_ONE_STEP_S = 60.0
"""Ranks stop within a step of the one that they need; a longer lead proves nothing."""
_SETTLED_S = 3.0
"""Every node has been heard again by then, if it is heard at all."""
_DESERTED_S = 60.0
"""A round of which nobody spoke for so long may be followed by one with a lower number."""
_MOVED_S = 0.5
_STANDING = frozenset({"running", "stalled"})
_NAMED_MOST = 100


@dataclass(frozen=True, slots=True)
class Located:
    """The finding, once for each stall of a round."""

    id: str
    job: str
    round: int
    first_ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    waiting_ranks: int
    section: str | None
    lead_s: float | None
    is_certain: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Where a rank stopped, and when, by the observer's clock."""

    rank: int
    node: str
    at_s: float
    step: int
    section: str | None
    collective: str | None = None
    """The collective that it is in; empty for none, None if nobody knows."""


@dataclass(slots=True)
class _Heard:
    """What a node said last while its ranks stood."""

    at_s: float
    beat: NodeBeat

    def halts(self) -> Iterator[Halt]:
        """Where its ranks stood. That one was stopped, or has ended, says nothing of that."""
        for rank in self.beat.ranks:
            if rank.state in _STANDING and _is_known(rank):
                yield Halt(
                    rank.rank,
                    self.beat.node,
                    self.at_s - rank.progress_age_s,
                    rank.step or 0,
                    rank.section,
                    rank.collective,
                )

    @property
    def is_vague(self) -> bool:
        """It has a rank of which nobody can say when it stopped."""
        return any(one.state in _STANDING and not _is_known(one) for one in self.beat.ranks)


@dataclass(slots=True)
class _Round:
    """One round of one job. Nothing of it reaches the next."""

    number: int
    heard_s: float
    nodes: dict[str, _Heard] = field(default_factory=dict)
    stalled: dict[int, Halt] = field(default_factory=dict)
    facts: dict[int, str] = field(default_factory=dict)
    """The facts that say so, by rank."""
    opened_s: float | None = None
    is_said: bool = False

    def open(self, halt: Halt, seen_s: float) -> None:
        """A rank has stalled."""
        self.stalled.setdefault(halt.rank, halt)
        if self.opened_s is None:
            self.opened_s = seen_s

    def hear(self, heard: _Heard, *, is_calm: bool) -> None:
        """What a node says of its ranks; `is_calm`: that none of them has stalled."""
        self.nodes[heard.beat.node] = heard
        if is_calm and not self.stalled:
            return
        states = {rank.rank: rank.state for rank in heard.beat.ranks}
        for halt in heard.halts():
            before = self.stalled.get(halt.rank)
            if states[halt.rank] == "stalled":
                self.open(halt, heard.at_s)
            elif before is not None and halt.at_s > before.at_s + _MOVED_S:
                self.over(halt.rank)
        for rank, state in states.items():
            if state == "paused":
                self.over(rank)

    def over(self, rank: int) -> None:
        """It moves again. When all do, the next stall is another one."""
        if self.stalled.pop(rank, None) is not None and not self.stalled:
            self.opened_s, self.is_said = None, False
            self.facts.clear()


class Locator:
    """The rounds of all jobs. `hear`, `stalled` and `recovered` as they come; `judge` every tick.

    All take seconds of a clock that stands still while we are blind.
    """

    def __init__(self, deserted_s: float) -> None:
        self._deserted_s = deserted_s
        self._rounds: dict[str, _Round] = {}

    def hear(self, beat: NodeBeat, seen_s: float) -> None:
        """How far the ranks of a node are."""
        if beat.round is None or beat.slot is None or not beat.ranks:
            return
        known = self._round(beat.job, beat.round, seen_s)
        states = {rank.state for rank in beat.ranks}
        if known is not None and not states.isdisjoint(_STANDING):
            known.hear(_Heard(seen_s, beat), is_calm="stalled" not in states)

    def stalled(self, fact: RankStalled, seen_s: float) -> None:
        """An agent has found that a rank stalled."""
        known = self._round(fact.job, fact.round, seen_s)
        if known is not None:
            known.facts[fact.rank] = fact.id
            at_s = seen_s - fact.waited_s
            known.open(Halt(fact.rank, fact.node, at_s, fact.step or 0, fact.section), seen_s)

    def recovered(self, fact: RankRecovered) -> None:
        """A rank moves again."""
        known = self._rounds.get(fact.job)
        if known is not None and known.number == fact.round:
            known.over(fact.rank)

    def end_job(self, job: str) -> None:
        """The job is over."""
        self._rounds.pop(job, None)

    def judge(self, seen_s: float, back_s: float) -> list[Located]:
        """Each stall that can be told about now. `back_s`: when we last ceased to be blind."""
        found: list[Located] = []
        for job, known in list(self._rounds.items()):
            if seen_s - known.heard_s > self._deserted_s:
                del self._rounds[job]
                continue
            opened_s = known.opened_s
            if opened_s is None or known.is_said:
                continue
            missing = sorted(name for name, one in known.nodes.items() if one.at_s < opened_s)
            if missing and seen_s - opened_s < _SETTLED_S:
                continue
            known.is_said = True
            is_vague = any(one.is_vague for one in known.nodes.values())
            is_whole = not missing and not is_vague and back_s < opened_s
            found.append(_located(job, known, missing, is_whole))
        return found

    def _round(self, job: str, number: int, seen_s: float) -> _Round | None:
        known = self._rounds.get(job)
        if known is not None and number < known.number and seen_s - known.heard_s < _DESERTED_S:
            return None
        if known is None or number != known.number:
            known = self._rounds[job] = _Round(number, seen_s)
        known.heard_s = seen_s
        return known


def _located(job: str, known: _Round, missing: list[str], is_whole: bool) -> Located:
    heard = [one for name, one in known.nodes.items() if name not in missing]
    halts = {**known.stalled, **{halt.rank: halt for one in heard for halt in one.halts()}}
    first, lead_s, why = _first(list(halts.values()))
    numbers = sorted(halt.rank for halt in first)
    sections = {halt.section for halt in first}
    section = sections.pop() if len(sections) == 1 else None
    nodes = sorted({halt.node for halt in first})
    waiting = len(halts) - len(first)
    return Located(
        id=_id(job, known, first),
        job=job,
        round=known.number,
        first_ranks=tuple(numbers[:_NAMED_MOST]),
        nodes=tuple(nodes[:_NAMED_MOST]),
        waiting_ranks=waiting,
        section=section,
        lead_s=None if lead_s is None else round(lead_s, 3),
        is_certain=is_whole and lead_s is not None and lead_s <= _ONE_STEP_S,
        reason=_reason(numbers, nodes, section, why, waiting=waiting, missing=missing),
    )


def _first(halts: list[Halt]) -> tuple[list[Halt], float | None, str]:
    """Who stopped first, by how much before the others where time tells, and how it is known."""
    most = len(halts) / 2
    behind = [halt for halt in halts if halt.step == min(one.step for one in halts)]
    if len(behind) <= most:
        lead_s = _lead_s(behind, halts)
        return behind, max(lead_s, 0.0), f"made its last step, {behind[0].step}, before all others"
    oldest_s = min(halt.at_s for halt in halts)
    early = [halt for halt in halts if halt.at_s <= oldest_s + _TOGETHER_S]
    lead_s = _lead_s(early, halts)
    if len(early) <= most and lead_s >= _TOGETHER_S:
        return early, lead_s, f"stopped {lead_s:.1f} s before all others"
    absent = [halt for halt in halts if halt.collective == ""]
    if absent and len(absent) <= most and all(halt.collective is not None for halt in halts):
        are = "is" if len(absent) == 1 else "are"
        return absent, None, f"{are} in no collective, while all others wait in one"
    sections = Counter(halt.section for halt in halts)
    usual, times = sections.most_common(1)[0]
    odd = [halt for halt in halts if halt.section != usual]
    if odd and times > most:
        return odd, None, f"stopped elsewhere: {times} others are in {_named(usual)}"
    if len(halts) == 1:
        return early, None, "is the only rank that is known of"
    return early, None, f"stopped within {_TOGETHER_S:g} s of each other: beats cannot tell more"


def _lead_s(first: Iterable[Halt], halts: Iterable[Halt]) -> float:
    ranks = {halt.rank: halt.at_s for halt in first}
    rest = [halt.at_s for halt in halts if halt.rank not in ranks]
    return min(rest, default=inf) - max(ranks.values()) if rest else 0.0


def _reason(
    ranks: list[int],
    nodes: list[str],
    section: str | None,
    why: str,
    *,
    waiting: int,
    missing: list[str],
) -> str:
    place = f" in {_named(section)}" if section is not None else ""
    said = f"{_listed(ranks, 'rank')} on {_listed(nodes, '')}{place} {why}"
    if waiting:
        said += f"; {waiting} {'others wait' if waiting > 1 else 'other waits'}"
    if missing:
        said += f"; nothing was heard since of {_listed(missing, '')}"
    return said


def _listed(names: list[int] | list[str], what: str) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    plural = f"{what}{'s' if len(names) > 1 else ''} " if what else ""
    return f"{plural}{shown}{more}"


def _named(section: str | None) -> str:
    return f"section {section}" if section else "no section"


def _is_known(rank: RankBeat) -> bool:
    """Its page says when it moved last; an age of exactly 0 is what a beat without that says."""
    return rank.step is not None or rank.progress_age_s > 0


def _id(job: str, known: _Round, first: list[Halt]) -> str:
    """The same from every observer that heard the same: of the stall's first fact, if any."""
    about = min(known.facts.values(), default="")
    if not about:
        about = ",".join(sorted(f"{halt.rank}@{halt.step}" for halt in first))
    text = "\n".join(("stall", job, str(known.number), about))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
