"""Which ranks of a round stopped first when ranks stall, and which merely wait for them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from everstep.ids import id_from
from everstep.messages import NodeBeat, RankBeat, RankRecovered, RankStalled

_TOGETHER_S = 0.25
"""Beats take time: the order of ranks that stopped within this time is unknown."""
_ONE_STEP_S = 60.0
"""Ranks stop within one step of the rank that they wait for: a longer lead proves nothing."""
_SETTLED_S = 3.0
"""By then, every node that is heard at all has sent another beat."""
_DESERTED_S = 60.0
"""A round that was silent for this time may be followed by one with a lower number."""
_MOVED_S = 0.5
_STANDING = frozenset({"running", "stalled"})
_NAMED_MOST = 100


@dataclass(frozen=True, slots=True)
class StallFinding:
    """A finding: where a stall of a round began. There is one for each stall."""

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
    """Where and when a rank stopped, by the observer's clock."""

    rank: int
    node: str
    at_s: float
    step: int
    section: str | None
    collective: str | None = None
    """The collective that the rank is in; empty for none, None if that is unknown."""


@dataclass(slots=True)
class _Heard:
    """The last beat of a node, and when it was heard."""

    at_s: float
    beat: NodeBeat

    def halts(self) -> Iterator[Halt]:
        """Where the node's ranks stand; ranks that were stopped or have ended do not count."""
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
        """The node has a rank whose time of stopping is unknown."""
        return any(rank.state in _STANDING and not _is_known(rank) for rank in self.beat.ranks)


@dataclass(slots=True)
class _Round:
    """One round of one job. The next round starts empty."""

    number: int
    heard_s: float
    nodes: dict[str, _Heard | None] = field(default_factory=dict)
    """Those that were heard, with their last beats once a rank has stalled."""
    stalled: dict[int, Halt] = field(default_factory=dict)
    facts: dict[int, str] = field(default_factory=dict)
    """The ids of the facts about them, by rank."""
    busy: set[int] = field(default_factory=set)
    """Those that wait for no other rank, as their agents have seen. Times alone do not
    tell: a stage of a pipeline may stop before the one that it waits for."""
    opened_s: float | None = None
    is_located: bool = False

    def open(self, halt: Halt, seen_s: float) -> None:
        """Note a rank that has stalled."""
        self.stalled.setdefault(halt.rank, halt)
        if self.opened_s is None:
            self.opened_s = seen_s

    def hear(self, beat: NodeBeat, at_s: float, *, is_calm: bool) -> None:
        """Note a beat; `is_calm`: none of the node's ranks has stalled."""
        if is_calm and not self.stalled:
            if beat.node not in self.nodes:
                self.nodes[beat.node] = None
            return
        heard = self.nodes[beat.node] = _Heard(at_s, beat)
        states = {rank.rank: rank.state for rank in beat.ranks}
        for halt in heard.halts():
            before = self.stalled.get(halt.rank)
            if states[halt.rank] == "stalled":
                self.open(halt, heard.at_s)
            elif before is not None and halt.at_s > before.at_s + _MOVED_S:
                self.resume(halt.rank)
        for rank, state in states.items():
            if state == "paused":
                self.resume(rank)

    def resume(self, rank: int) -> None:
        """Note that the rank moves again. Once all do, the next stall is a new one."""
        if self.stalled.pop(rank, None) is not None and not self.stalled:
            self.opened_s, self.is_located = None, False
            self.nodes = dict.fromkeys(self.nodes)
            self.facts.clear()
            self.busy.clear()


class StallLocator:
    """The stalls of all jobs.

    Call `hear`, `stalled` and `recovered` for each message, and `judge` every tick. Times are of
    the observer's clock, which stands still while health is blind.
    """

    def __init__(self, deserted_s: float) -> None:
        self._deserted_s = deserted_s
        self._rounds: dict[str, _Round] = {}

    def hear(self, beat: NodeBeat, seen_s: float) -> None:
        """Take in where the ranks of a node are."""
        if beat.round is None or beat.slot is None or not beat.ranks:
            return
        round_ = self._round(beat.job, beat.round, seen_s)
        states = {rank.state for rank in beat.ranks}
        if round_ is not None and not states.isdisjoint(_STANDING):
            round_.hear(beat, seen_s, is_calm="stalled" not in states)

    def stalled(self, fact: RankStalled, seen_s: float) -> None:
        """Take in that an agent has found a stalled rank."""
        round_ = self._round(fact.job, fact.round, seen_s)
        if round_ is not None:
            round_.facts[fact.rank] = fact.id
            if fact.is_waiting_for_ranks is False:
                round_.busy.add(fact.rank)
            at_s = seen_s - fact.waited_s
            round_.open(Halt(fact.rank, fact.node, at_s, fact.step or 0, fact.section), seen_s)

    def recovered(self, fact: RankRecovered) -> None:
        """Take in that a rank moves again."""
        round_ = self._rounds.get(fact.job)
        if round_ is not None and round_.number == fact.round:
            round_.resume(fact.rank)

    def end_job(self, job: str) -> None:
        """The job is over."""
        self._rounds.pop(job, None)

    def judge(self, seen_s: float, back_s: float) -> list[StallFinding]:
        """The stalls that can be located now. `back_s`: when health last ceased to be blind."""
        stalls: list[StallFinding] = []
        for job, round_ in list(self._rounds.items()):
            if seen_s - round_.heard_s > self._deserted_s:
                del self._rounds[job]
                continue
            opened_s = round_.opened_s
            if opened_s is None or round_.is_located:
                continue
            heard = [node for node in round_.nodes.values() if node and node.at_s >= opened_s]
            missing = sorted(round_.nodes.keys() - {node.beat.node for node in heard})
            if missing and seen_s - opened_s < _SETTLED_S:
                continue
            round_.is_located = True
            is_vague = any(node.is_vague for node in heard)
            is_whole = not missing and not is_vague and back_s < opened_s
            stalls.append(_located(job, round_, heard, missing, is_whole))
        return stalls

    def _round(self, job: str, number: int, seen_s: float) -> _Round | None:
        """The round to note it in; None if that round is over."""
        round_ = self._rounds.get(job)
        if round_ is not None and number < round_.number and seen_s - round_.heard_s < _DESERTED_S:
            return None
        if round_ is None or number != round_.number:
            round_ = self._rounds[job] = _Round(number, seen_s)
        round_.heard_s = seen_s
        return round_


def _located(
    job: str, round_: _Round, heard: list[_Heard], missing: list[str], is_whole: bool
) -> StallFinding:
    halts = {**round_.stalled, **{halt.rank: halt for node in heard for halt in node.halts()}}
    first, lead_s, why = _first(list(halts.values()))
    numbers = sorted(halt.rank for halt in first)
    sections = {halt.section for halt in first}
    section = sections.pop() if len(sections) == 1 else None
    nodes = sorted({halt.node for halt in first})
    waiting = len(halts) - len(first)
    is_known = is_whole and lead_s is not None and lead_s <= _ONE_STEP_S
    is_certain = is_known and round_.busy.issuperset(numbers)
    return StallFinding(
        id=_id(job, round_, first),
        job=job,
        round=round_.number,
        first_ranks=tuple(numbers[:_NAMED_MOST]),
        nodes=tuple(nodes[:_NAMED_MOST]),
        waiting_ranks=waiting,
        section=section,
        lead_s=None if lead_s is None else round(lead_s, 3),
        is_certain=is_certain,
        reason=f"{_place(numbers, nodes, section)} {why}"
        + _others(waiting, missing, is_certain=is_certain),
    )


def _first(halts: list[Halt]) -> tuple[list[Halt], float | None, str]:
    """The ranks that stopped first, their lead where times tell, and how that is known."""
    most = len(halts) / 2
    last_step = min(halt.step for halt in halts)
    behind = [halt for halt in halts if halt.step == last_step]
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
        return early, None, "is the only rank whose position is known"
    return early, None, f"stopped within {_TOGETHER_S:g} s of each other: beats cannot tell more"


def _lead_s(first: Iterable[Halt], halts: Iterable[Halt]) -> float:
    ranks = {halt.rank: halt.at_s for halt in first}
    rest = [halt.at_s for halt in halts if halt.rank not in ranks]
    return min(rest, default=inf) - max(ranks.values()) if rest else 0.0


def _place(ranks: list[int], nodes: list[str], section: str | None) -> str:
    place = f" in {_named(section)}" if section is not None else ""
    return f"{_listed(ranks, 'rank')} on {_listed(nodes, '')}{place}"


def _others(waiting: int, missing: list[str], *, is_certain: bool) -> str:
    text = ""
    if waiting:
        wait = f"{waiting} {'others wait' if waiting > 1 else 'other waits'}"
        text = f"; {wait}" if is_certain else ", but may wait, too"
    silent = f"; up to this finding, health had not heard {_listed(missing, '')} since"
    return text + (silent if missing else "")


def _listed(names: list[int] | list[str], noun: str) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    plural = f"{noun}{'s' if len(names) > 1 else ''} " if noun else ""
    return f"{plural}{shown}{more}"


def _named(section: str | None) -> str:
    return f"section {section}" if section else "no section"


def _is_known(rank: RankBeat) -> bool:
    """Whether the beat tells when the rank last moved; an age of exactly 0 tells nothing."""
    return rank.step is not None or rank.progress_age_s > 0


def _id(job: str, round_: _Round, first: list[Halt]) -> str:
    """An id that is the same from every observer which heard the same messages."""
    about = min(round_.facts.values(), default="")
    if not about:
        about = ",".join(sorted(f"{halt.rank}@{halt.step}" for halt in first))
    return id_from("stall", job, str(round_.number), about)
