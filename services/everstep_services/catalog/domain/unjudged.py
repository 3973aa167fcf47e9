"""Results that cannot be right: since which step checkpoints are suspect, and what clears them."""

from msgspec.structs import replace

from everstep.messages import (
    NumericsActed,
    NumericsJudged,
    NumericsSuspected,
    UnjudgedResult,
)
from everstep.observe.printable import beginning
from everstep_services.catalog.domain.index import Index

_MOST = 16
_REASON_MOST = 300
_BY_DATA = frozenset({"", "correct_but_unexpected"})
_SPIKES = frozenset({"loss_spike", "grad_norm_spike", "output_spike", "restored_loss"})
"""Signals that a healthy training has, too."""


def take_result(index: Index, fact: NumericsSuspected | NumericsJudged | NumericsActed) -> None:
    """Note a suspicion and its judgement; forget it once the training rests on it no more."""
    case = index.unjudged.get(fact.case)
    match fact:
        case NumericsSuspected():
            index.unjudged[fact.case] = UnjudgedResult(
                case=fact.case, moved_at=fact.moved_at, reason=beginning(fact.reason, _REASON_MOST),
                signal=fact.signal,
            )  # fmt: skip
            while len(index.unjudged) > _MOST:
                del index.unjudged[next(iter(index.unjudged))]
        case NumericsJudged() if case is not None:
            told = beginning(f"{fact.kind}: {fact.reason}", _REASON_MOST)
            index.unjudged[fact.case] = replace(case, kind=fact.kind, reason=told)
        case NumericsActed() if case is not None and _is_cleared(case, fact):
            del index.unjudged[fact.case]
        case _:
            return


def trust(index: Index, step: int) -> None:
    """A person trusts the checkpoint of this step: forget what makes it suspect."""
    for case in [it.case for it in index.unjudged.values() if it.moved_at <= step]:
        del index.unjudged[case]


def _is_cleared(case: UnjudgedResult, fact: NumericsActed) -> bool:
    """Whether the state of the training has nothing of the result, or the result was right.

    The checkpoints that a roll-back leaves behind are quarantined by facts of their own.
    """
    if fact.outcome == "done":
        return fact.action in {"again", "rollback", "skip"}
    return case.signal in _SPIKES and case.kind in _BY_DATA
