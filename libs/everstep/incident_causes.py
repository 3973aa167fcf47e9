"""The table of incident causes: what can end a round, and all that follows from each cause.

The words are those of `round_ended.cause` and `incident_opened.trigger`, which stay open on the
wire; `meaning_of` closes the set. To add a cause, add a member to `IncidentCause` and a row to
`_row`: mypy reports a member without a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard, assert_never, get_args

IncidentCause = Literal[
    "rank_exited",
    "rank_stalled",
    "check_failed",
    "start_failed",
    "node_lost",
    "node_left",
    "preempted",
    "operator",
    "grow",
    "document_lost",
    "restarted_in_process",
    "numerics",
    "done",
    "other",
]
"""`other` is any word of a newer release."""

Party = Literal["script", "node", "scheduler", "operator"]
EvidenceTime = Literal["none", "crash", "stall"]

SECONDARY = "secondary:"
"""Before the fingerprint of a failure that looks like the consequence of another rank's end."""

WAITS = f"{SECONDARY}waits"
"""The fingerprint of the stall of a rank that waits for others."""

IN_PROCESS: IncidentCause = "restarted_in_process"
NUMERICS: IncidentCause = "numerics"
OF_NO_PERSON = frozenset({"service", NUMERICS})
"""Origins of requests that no person makes, as `operator_acted.origin` has them."""
BY_MONITOR = "monitor"
"""`rank_stalled.signal` of a rank that the monitor of its in-process restart ends."""

CONSEQUENCE, PLAIN, NODE = 1, 2, 3
"""How much a report explains of the others: nothing, something, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseMeaning:
    """The consequences of one cause."""

    fault: tuple[Party, ...] = ()
    """Whom the cause alone points at, before any evidence is read; empty for nobody."""
    costs_restart: bool = False
    """The restart after it is taken from the budgets."""
    opens_incident: bool = True
    """It opens an incident where none is open."""
    evidence: EvidenceTime = "crash"
    """How long agents may collect evidence: not at all, or as after a crash or a stall."""
    weight: int = PLAIN
    """How well it explains other reports of the same incident."""
    keeps_ranks: bool = False
    """Ranks that survive rounds are parked after it; otherwise their state may be the reason, or
    a person wants new processes."""

    @property
    def can_recur(self) -> bool:
        """The script may bring it about again, as often as it is started."""
        return self.fault == ("script",)


def meaning_of(cause: str) -> CauseMeaning:
    """The consequences of a cause; a word that this release does not know means `other`."""
    return _TABLE[cause if is_cause(cause) else "other"]


def is_cause(word: str) -> TypeGuard[IncidentCause]:
    """Whether this release knows the word."""
    return word in _TABLE


def known_cause(word: str) -> IncidentCause:
    """The cause that a word of the wire names; `other` for one that this release does not know."""
    return word if is_cause(word) else "other"


def _row(cause: IncidentCause) -> CauseMeaning:  # noqa: C901, PLR0911, PLR0912  a table
    match cause:
        case "rank_exited" | "start_failed":
            return CauseMeaning(fault=("script",), costs_restart=True, keeps_ranks=True)
        case "rank_stalled":
            return CauseMeaning(
                fault=("script",), costs_restart=True, evidence="stall", keeps_ranks=True
            )
        case "check_failed":  # by a probe's policy; another node passes the same check
            return CauseMeaning(fault=("node",), costs_restart=True, keeps_ranks=True)
        case "node_lost":
            return CauseMeaning(fault=("node",), costs_restart=True, weight=NODE, keeps_ranks=True)
        case "node_left":  # its agent reported it: the scheduler or a person sent it away
            return CauseMeaning(
                fault=("scheduler", "operator"), costs_restart=True, keeps_ranks=True
            )
        case "preempted":
            return CauseMeaning(fault=("scheduler",), evidence="none", keeps_ranks=True)
        case "operator":
            return CauseMeaning(fault=("operator",), opens_incident=False, evidence="none")
        case "grow":
            return CauseMeaning(opens_incident=False, evidence="none", keeps_ranks=True)
        case "done":
            return CauseMeaning(opens_incident=False, evidence="none")
        case "document_lost":
            return CauseMeaning(keeps_ranks=True)
        case "other":
            return CauseMeaning()
        case "numerics":  # a result that cannot be right: only its judgement names a party
            return CauseMeaning()
        case "restarted_in_process":  # the script's own wrapper did it: no process has ended
            return CauseMeaning(evidence="none")
        case _:
            assert_never(cause)


_TABLE: Mapping[str, CauseMeaning] = {cause: _row(cause) for cause in get_args(IncidentCause)}
