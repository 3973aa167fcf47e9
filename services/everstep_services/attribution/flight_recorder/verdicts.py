"""What the analysis says: faults, suspects, and how far everybody is."""

from collections.abc import Mapping
from typing import Literal

import msgspec

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
    """What the dumps of a job say together."""

    verdict: Verdict
    summary: str
    ranks: int
    """How many ranks the job has, as far as the dumps tell."""
    dumps: int
    faults: tuple[Fault, ...] = ()
    meetings: tuple[MeetingState, ...] = ()
    without_dump: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
