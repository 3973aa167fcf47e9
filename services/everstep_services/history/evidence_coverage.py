"""Which evidence a verdict had, which was missing, and what the missing one would have decided."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.verdict_causes import VERDICT_CAUSES, VerdictCause

TELLS: Mapping[str, frozenset[VerdictCause]] = {
    "exception": frozenset({"user_code", "configuration", "data", "framework", "storage"}),
    "log": frozenset(VERDICT_CAUSES) - {"unknown"},
    "flight_recorder": frozenset({"user_code", "network"}),
    "stacks": frozenset({"user_code", "framework", "storage", "network"}),
    "kernel_log": frozenset({"gpu", "host"}),
    "gpu": frozenset({"gpu"}),
    "process": frozenset({"host", "storage"}),
    "cgroup": frozenset({"host"}),
}
"""The causes that each kind of evidence can confirm, or rule out. Logs have more names."""
_LOGS = frozenset({"stdout", "stderr"})
_REASONS_MOST = 3
_NOBODY: Mapping[str, str] = {"exception": "no rank has reported any"}
_NO_AGENT = "no agent has sent any"
_OF_RANK = re.compile(r"(\w+) of rank \d+: (.+)")
"""What a piece of a node lacks, as a verdict lists it."""


@dataclass(slots=True)
class Coverage:
    """One kind of evidence about an incident."""

    kind: str
    pieces: int = 0
    missing: int = 0
    reasons: list[str] = field(default_factory=list)
    """Why pieces are missing; each reason once."""
    decides: list[str] = field(default_factory=list)
    """The causes between which the missing pieces would have decided; empty for none."""


def coverage(
    pieces: Iterable[tuple[str | None, str | None]],
    considered: Sequence[str],
    recorded: Collection[str] = (),
    lacks: Iterable[str] = (),
) -> list[Coverage]:
    """The coverage of each kind, from pairs of a kind and the reason why it is missing.

    `considered` are the cause of the verdict, and its alternatives; `recorded` are kinds that
    facts about the ranks hold, so that no piece of them is missing. `lacks` is what the verdict
    lists as missing: the piece of a node may lack some of its ranks.
    """
    by_kind = {kind: Coverage(kind) for kind in TELLS}
    of_ranks = [match.groups() for text in lacks if (match := _OF_RANK.fullmatch(text))]
    for kind, reason in (*pieces, *of_ranks):
        name = "log" if kind in _LOGS else kind or "unknown"
        of_kind = by_kind.setdefault(name, Coverage(name))
        if not reason:
            of_kind.pieces += 1
            continue
        of_kind.missing += 1
        if reason not in of_kind.reasons[:_REASONS_MOST]:
            of_kind.reasons = [*of_kind.reasons, reason][:_REASONS_MOST]
    for of_kind in by_kind.values():
        if of_kind.kind in recorded and not of_kind.missing:
            continue
        if not of_kind.pieces and not of_kind.missing:
            of_kind.reasons = [_NOBODY.get(of_kind.kind, _NO_AGENT)]
        if of_kind.missing or not of_kind.pieces:
            of_kind.decides = _undecided(of_kind.kind, considered)
    return list(by_kind.values())


def _undecided(kind: str, considered: Sequence[str]) -> list[str]:
    """The considered causes, if this kind tells one of them from another.

    Where a verdict leaves the cause open, it may have a single one to confirm or to rule out.
    """
    causes = list(dict.fromkeys(considered))
    tells = TELLS.get(kind, frozenset())
    is_open = len(causes) > 1 and any(cause in tells for cause in causes)
    return [cause for cause in causes if cause != "unknown"] if is_open else []
