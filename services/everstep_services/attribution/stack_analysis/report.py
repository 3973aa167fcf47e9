"""The answer: as data, as text with the verdict first, and folded for flame graphs."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from everstep.observe.printable import printable
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.flight_recorder.ranges import named, ranges
from everstep_services.attribution.stack_analysis.rules import ACTIVITIES, Activity, ThreadState

Verdict = Literal["odd_ranks", "inconclusive", "nothing"]
Pattern = Literal["odd", "split", "together", "scattered"]
"""How the ranks stand to each other: some apart from all others, in parts that wait for each other,
all at one place, or all over the code."""
_MOST_GROUPS = 12
_MOST_OTHERS = 8
_MOST_SUSPECTS = 8
_SHOWN_FRAMES = 12


class StackSuspect(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that stands elsewhere than those that wait."""

    rank: int
    reason: str
    activity: Activity
    domain: VerdictCause
    """The area of the trouble, as far as a stack shows it."""
    certainty: float = 0.0


class StackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Threads with one and the same stack."""

    ranks: tuple[int, ...]
    thread: str
    state: ThreadState
    frames: tuple[str, ...]
    """The innermost one first."""
    has_interpreter: tuple[int, ...] = ()
    """The ranks in which it held the interpreter's lock."""


class StackReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all stacks of a job together."""

    verdict: Verdict
    pattern: Pattern
    summary: str
    confidence: float
    ranks: int
    """The number of ranks with a stack."""
    suspects: tuple[StackSuspect, ...] = ()
    waiting: tuple[int, ...] = ()
    """The ranks that wait for others."""
    groups: tuple[StackGroup, ...] = ()
    """The main threads, the largest group first."""
    others: tuple[StackGroup, ...] = ()
    """Other threads, and processes that ranks have started, unless they are idle."""
    missing: tuple[int, ...] = ()
    """The ranks without any stack."""
    notes: tuple[str, ...] = ()


def words(state: ThreadState) -> str:
    """`waits in a collective (barrier) within a save`."""
    text = ACTIVITIES[state.activity].words
    if state.call:
        text += f" ({state.call})"
    if state.within is not None:
        text += f", while it {ACTIVITIES[state.within].words}"
    return text


def lines(report: StackReport) -> Iterator[str]:
    """A report for people."""
    yield printable(report.summary)
    yield ""
    for suspect in report.suspects[:_MOST_SUSPECTS]:
        yield printable(f"  rank {suspect.rank}: {suspect.reason}")
    if len(report.suspects) > _MOST_SUSPECTS:
        yield f"  … and {len(report.suspects) - _MOST_SUSPECTS} more ranks"
    if report.suspects:
        yield f"  confidence {report.confidence:.2f}"
        yield ""
    yield from _groups("Main threads:", report.groups, _MOST_GROUPS)
    yield from _groups("Other threads that are not idle:", report.others, _MOST_OTHERS)
    yield f"Stacks of {report.ranks} ranks were read."
    if report.missing:
        yield f"No stack: {named(report.missing)}."
    yield from (printable(f"Note: {note}.") for note in report.notes)


def _groups(title: str, groups: tuple[StackGroup, ...], most: int) -> Iterator[str]:
    if not groups:
        return
    yield title
    for group in groups[:most]:
        thread = "" if group.thread == "MainThread" else f" {group.thread or 'without a name'}:"
        number = f"{len(group.ranks)} ranks" if len(group.ranks) > 1 else "rank"
        lock = f", {_holds(group)} the interpreter's lock" if _is_holder(group) else ""
        yield printable(f"  {number} {ranges(group.ranks)}:{thread} {words(group.state)}{lock}")
        yield from (printable(f"      {frame}") for frame in group.frames[:_SHOWN_FRAMES])
        if len(group.frames) > _SHOWN_FRAMES:
            yield f"      … {len(group.frames) - _SHOWN_FRAMES} frames further out"
    if len(groups) > most:
        yield f"  … and {len(groups) - most} more stacks (all of them: -o json)"
    yield ""


def _is_holder(group: StackGroup) -> bool:
    return bool(group.has_interpreter) and group.state.activity != "native"


def _holds(group: StackGroup) -> str:
    if group.has_interpreter == group.ranks:
        return "and holds"
    return f"and on {named(group.has_interpreter)} holds"


def folded(report: StackReport) -> Iterator[str]:
    """`thread;outermost;…;innermost count`, a line a stack, as flame graphs are made from."""
    for group in (*report.groups, *report.others):
        frames = [group.thread or "thread", *reversed(group.frames)]
        stack = ";".join(printable(frame).replace(";", ",") for frame in frames)
        yield f"{stack} {len(group.ranks)}"
