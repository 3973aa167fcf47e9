"""The meaning of Xid errors, alone and together: pure, over the table in `xid_table.toml`."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

ACTIONS = ("ignore", "restart_app", "report", "reset", "drain", "reboot", "replace")
"""From the harmless to the expensive."""
RECOVERY_XID = 154
TOGETHER_S = 60.0
"""Xids within this time belong to one trouble."""

_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to (0x[0-9a-f]+)", re.I)
_WANTED = {0: "ignore", 1: "reset", 2: "reboot", 3: "drain", 4: "drain", 6: "reset", 7: "reboot"}
"""The actions that Xid 154 asks for, by its number; any other is reported."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One line of the driver."""

    at: float
    gpu: str
    """The PCI address of the GPU."""
    number: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Xid:
    """One row of the table."""

    number: int
    name: str
    kind: str
    """Who is affected: the table's `class`."""
    action: str
    source: str
    note: str
    unless: str = ""
    """A word in its text that turns it into a mere remark."""


@dataclass(frozen=True, slots=True)
class Together:
    """How other Xids nearby change the meaning of an Xid."""

    number: int
    company: frozenset[int]
    is_elsewhere: bool
    """The other Xid is on another GPU of this node."""
    action: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class Repeats:
    """How repetition changes the meaning of an Xid."""

    kinds: frozenset[str]
    actions: frozenset[str]
    """The actions without repetition."""
    times: int
    action: str
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class XidTable:
    """All tables about Xids."""

    sources: Mapping[str, str]
    rows: Mapping[int, Xid]
    together: Sequence[Together]
    repeats: Sequence[Repeats]


@dataclass(frozen=True, slots=True)
class XidJudgement:
    """The meaning of one Xid on one GPU."""

    gpu: str
    number: int
    action: str
    reason: str
    last_at: float


@cache
def table() -> XidTable:
    """The table of this release."""
    document = tomllib.loads(resources.files(__package__).joinpath("xid_table.toml").read_text())
    rows = [
        Xid(
            int(number),
            name,
            group["class"],
            group["action"],
            group["source"],
            group["note"],
            group.get("unless", ""),
        )
        for group in document["group"]
        for number, name in group["xids"].items()
    ]
    return XidTable(
        sources=document["sources"],
        rows={row.number: row for row in rows},
        together=[
            Together(
                each["xid"],
                frozenset(each["with"]),
                each.get("elsewhere", False),
                each["action"],
                each["source"],
                each["note"],
            )
            for each in document["together"]
        ],
        repeats=[
            Repeats(
                frozenset(each["classes"]),
                frozenset(each["actions"]),
                each["times"],
                each["action"],
                each["source"],
                each["note"],
            )
            for each in document["repeats"]
        ],
    )


def judge(events: Iterable[XidEvent], now: float, window_s: float) -> list[XidJudgement]:
    """One judgement for each Xid of each GPU that still counts; the gravest first.

    A trouble that only a reboot cures counts until then; any other for `window_s`. The driver's
    own advice (Xid 154) overrules the table for everything before it on that GPU.
    """
    by_time = sorted(
        (event for event in events if _is_lasting(event) or now - event.at <= window_s),
        key=lambda event: event.at,
    )
    judged = [
        judgement
        for gpu in sorted({event.gpu for event in by_time})
        for judgement in _of_gpu(gpu, by_time)
    ]
    counting = [
        each for each in judged if each.action == "reboot" or now - each.last_at <= window_s
    ]
    return sorted(counting, key=lambda each: -ACTIONS.index(each.action))


def _is_lasting(event: XidEvent) -> bool:
    row = table().rows.get(event.number)
    return event.number == RECOVERY_XID or (row is not None and row.action == "reboot")


def _of_gpu(gpu: str, all_events: Sequence[XidEvent]) -> Iterator[XidJudgement]:
    mine = [event for event in all_events if event.gpu == gpu]
    word = next((event for event in reversed(mine) if event.number == RECOVERY_XID), None)
    if word is not None:
        yield from _by_word(word, mine)
        # the driver's advice covers what came with it
        mine = [event for event in mine if event.at > word.at + TOGETHER_S]
    for number in sorted({event.number for event in mine}):
        of_number = [event for event in mine if event.number == number]
        yield _of_number(of_number, all_events)


def _by_word(word: XidEvent, mine: Sequence[XidEvent]) -> Iterator[XidJudgement]:
    wanted = _RECOVERY.search(word.text)
    action = _WANTED.get(int(wanted[1], 16), "report") if wanted else "report"
    before = sorted({event.number for event in mine if abs(word.at - event.at) <= TOGETHER_S})
    causes = [number for number in before if number != RECOVERY_XID]
    reason = word.text.removesuffix(".")
    if causes:
        reason += f", with {_listed(causes)}"
    yield XidJudgement(word.gpu, RECOVERY_XID, action, reason, word.at)


def _of_number(events: Sequence[XidEvent], all_events: Sequence[XidEvent]) -> XidJudgement:
    last = events[-1]
    row = table().rows.get(last.number)
    if row is None:
        reason = f"{last.text}: unknown to this release"
        return XidJudgement(last.gpu, last.number, "report", reason, last.at)
    action, why = row.action, row.note
    if row.unless:
        fatal = [event for event in events if row.unless not in event.text]
        action, events = (action, fatal) if fatal else ("ignore", events)
        last = events[-1]
    for rule in table().together:
        if rule.number == row.number and _has_company(rule, last, all_events):
            action, why = rule.action, rule.note
    times = _episodes(events)
    for more in table().repeats:
        if row.kind in more.kinds and action in more.actions and times >= more.times:
            action, why = more.action, f"{times} times: {more.note}"
            break
    return XidJudgement(last.gpu, row.number, action, f"{row.name}. {why}", last.at)


def _has_company(rule: Together, event: XidEvent, events: Iterable[XidEvent]) -> bool:
    return any(
        other.number in rule.company
        and (other.gpu != event.gpu) == rule.is_elsewhere
        and abs(other.at - event.at) <= TOGETHER_S
        for other in events
    )


def _episodes(events: Sequence[XidEvent]) -> int:
    """The number of troubles: a driver repeats itself within one."""
    return 1 + sum(later.at - sooner.at > TOGETHER_S for sooner, later in pairwise(events))


def _listed(numbers: Sequence[int]) -> str:
    return "Xid " + ", ".join(map(str, numbers))
