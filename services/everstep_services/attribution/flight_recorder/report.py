"""The answer of the flight recorders, as data and as text."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from everstep_services.attribution.flight_recorder.ranges import named, ranges

Kind = Literal[
    "never_joined", "no_dump", "mismatch", "not_started", "half_completed", "stuck", "cycle"
]
Verdict = Literal["culprits", "inconclusive", "nothing_pending"]
Presence = Literal["completed", "started", "scheduled", "never_joined", "no_dump"]


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that others wait for."""

    rank: int
    reason: str


class MeetingState(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one group that is not over, and how far each of its ranks is."""

    group: str
    sequence: int
    operation: str
    where: str
    """The line of a script that waits there, where a dump has stacks."""
    age_s: float | None
    """How long ago the last rank came to it; None where no dump says when it was written."""
    ranks: Mapping[Presence, tuple[int, ...]]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, and the ranks that may have caused it."""

    kind: Kind
    summary: str
    confidence: float
    suspects: tuple[Suspect, ...]
    waiting: tuple[int, ...] = ()
    """The ranks that wait for it, directly or through others."""


class FlightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all dumps of a job together."""

    verdict: Verdict
    summary: str
    ranks: int
    """The number of ranks of the job, as far as the dumps show it."""
    dumps: int
    faults: tuple[Fault, ...] = ()
    meetings: tuple[MeetingState, ...] = ()
    without_dump: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


MOST_FAULTS = 3
"""How many faults people are shown."""
_MOST_SUSPECTS = 8
_MOST_MEETINGS = 10
_STATES = {
    "completed": "completed",
    "started": "started",
    "scheduled": "joined",
    "never_joined": "never joined",
    "no_dump": "no dump",
}


def lines(
    report: FlightReport, *, most: int = _MOST_MEETINGS, groups: Collection[str] = ()
) -> Iterator[str]:
    """Yield a report for people, limited to these groups and this number of collectives."""
    yield report.summary
    yield ""
    for number, fault in enumerate(report.faults[:MOST_FAULTS], 1):
        yield from _fault(number, fault)
    if len(report.faults) > MOST_FAULTS:
        yield from (f"{more_faults(report.faults[MOST_FAULTS:])} (all by -o json)", "")
    meetings = [meeting for meeting in report.meetings if _is_of(meeting, groups)]
    if meetings:
        yield "Collectives that are not over:"
        for meeting in meetings[:most]:
            yield from _meeting(meeting)
        if len(meetings) > most:
            yield f"  … and {len(meetings) - most} more (--mismatch-cap, or all by -o json)"
        yield ""
    yield f"{report.dumps} dumps of {report.ranks} ranks were read."
    if report.without_dump:
        yield f"No dump: {named(report.without_dump)}."
    yield from (f"Note: {note}." for note in report.notes)


def more_faults(faults: Sequence[Fault]) -> str:
    """One line for the faults that are not shown."""
    ranks = named(suspect.rank for fault in faults for suspect in fault.suspects)
    return f"… and {len(faults)} more fault{'s' * (len(faults) > 1)}, of {ranks}"


def _is_of(meeting: MeetingState, groups: Collection[str]) -> bool:
    """Whether it is of one of these groups; groups that share a description have a longer key."""
    return not groups or any(
        meeting.group in {group, f"group {group}"} or meeting.group.startswith(f"{group} (")
        for group in groups
    )


def _fault(number: int, fault: Fault) -> Iterator[str]:
    kind = fault.kind.replace("_", " ")
    yield f"{number}. {fault.summary}"
    yield f"   kind {kind}, confidence {fault.confidence:.2f}" + (
        f", {named(fault.waiting)} wait{'s' * (len(fault.waiting) == 1)} for it"
        if fault.waiting
        else ""
    )
    if len(fault.suspects) > _MOST_SUSPECTS:
        yield f"   any of {named(suspect.rank for suspect in fault.suspects)}"
    else:
        yield from (f"   rank {suspect.rank}: {suspect.reason}" for suspect in fault.suspects)
    yield ""


def _meeting(meeting: MeetingState) -> Iterator[str]:
    age = f", for {meeting.age_s:.1f} s" if meeting.age_s is not None else ""
    yield f"  {meeting.operation}, number {meeting.sequence} of {meeting.group}{age}"
    if meeting.where:
        yield f"    at {meeting.where}"
    for state, name in _STATES.items():
        ranks = meeting.ranks.get(state)  # type: ignore[call-overload]
        if ranks:
            yield f"    {name:<13} {ranges(ranks)}"
