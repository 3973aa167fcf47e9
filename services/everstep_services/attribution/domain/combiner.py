"""All claims about an incident into one verdict. Pure; its numbers are in `weights.toml`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from everstep.messages import Case
from everstep_services.attribution.domain.claims import Cause, Claim, is_sound
from everstep_services.attribution.domain.explanations import Explanation, explanations
from everstep_services.attribution.domain.weights import Weights, shipped

Advice = Literal["restart", "restart_without", "stop", "wait", "inform"]
_ALTERNATIVES_MOST = 5
_EVIDENCE_MOST = 24
_RANKS_MOST = 256
_NODES_MOST = 64
_TOLD_RANKS = 8
_HARDLY = 0.05
_AGAIN = "history"
_WAITS_FOR_NODES = frozenset({"preempted", "time_limit", "quota"})


@dataclass(frozen=True, slots=True)
class Considered:
    """Another explanation, and why it was not chosen."""

    cause: Cause
    confidence: float
    reason: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the claims come to."""

    cause: Cause
    kind: str
    confidence: float
    reason: str
    advice: Advice
    is_inconclusive: bool
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    is_transient: bool | None = None
    fingerprint: str = ""
    evidence: tuple[tuple[Claim, float], ...] = ()
    """Claims with what they count; below 0 for those that speak against."""
    others: tuple[Considered, ...] = ()
    missing: tuple[str, ...] = ()


def combine(
    case: Case, claims: Sequence[Claim], missing: Sequence[str], weights: Weights | None = None
) -> Judged:
    """The verdict. What cannot be weighed is left out, and named."""
    weights = weights or shipped()
    sound = [claim for claim in claims if is_sound(claim)]
    bad = sorted({claim.analyzer for claim in claims} - {claim.analyzer for claim in sound})
    unclear = tuple(f"{name}: its claims have invalid values" for name in bad)
    found = explanations(sound, weights)
    lacks = (*missing, *unclear, *_lacks(case))
    if not found:
        reason = f"inconclusive: there is no evidence for a cause of {case.trigger or 'the end'}"
        return Judged("unknown", "", 0.0, reason, "restart", is_inconclusive=True, missing=lacks)
    return _judged(found, sound, lacks, weights)


def _judged(
    found: Sequence[Explanation],
    claims: Sequence[Claim],
    missing: tuple[str, ...],
    weights: Weights,
) -> Judged:
    best, rest = found[0], found[1:]
    confidence = _confidence(best, rest[0] if rest else None, weights)
    is_unsure = confidence < weights.confidence.least
    others = rest if not is_unsure else found
    considered = tuple(
        _considered(one, best, confidence, weights) for one in others[:_ALTERNATIVES_MOST]
    )
    weighed = _evidence(best, claims, weights)
    if is_unsure:
        reason = f"inconclusive: {best.lead.says}, but {_doubt(best, rest)}"
        return Judged(
            "unknown", best.lead.kind, round(confidence, 2), reason, "restart",
            is_inconclusive=True,            evidence=weighed, others=considered, missing=missing,
        )  # fmt: skip
    is_transient = _is_transient(best)
    return Judged(
        cause=best.cause,
        kind=best.lead.kind,
        confidence=round(confidence, 2),
        reason=_reason(best, claims),
        advice=_advice(best, is_transient, _came_again(best)),
        is_inconclusive=False,
        ranks=best.ranks[:_RANKS_MOST],
        nodes=best.nodes[:_NODES_MOST],
        is_transient=is_transient,
        fingerprint=_fingerprint(best),
        evidence=weighed,
        others=considered,
        missing=missing,
    )


def _confidence(best: Explanation, rival: Explanation | None, weights: Weights) -> float:
    numbers = weights.confidence
    against = numbers.rival * rival.score if rival else 0.0
    odds = numbers.bias + numbers.slope * best.score - against
    return min(1 / (1 + math.exp(-odds)), numbers.most)


def _considered(
    one: Explanation, best: Explanation, confidence: float, weights: Weights
) -> Considered:
    own = _confidence(one, best, weights) if one is not best else confidence
    if one is best:
        why = "the likeliest cause, but not likely enough"
    elif one.against:
        why = f"against it: {one.against[0].says}"
    else:
        why = f"it has less evidence ({one.score:.2f}) than {best.cause} ({best.score:.2f})"
    return Considered(
        one.cause, round(own, 2), f"{one.lead.says}; {why}",
        one.ranks[:_TOLD_RANKS], one.nodes[:_TOLD_RANKS],
    )  # fmt: skip


def _evidence(
    best: Explanation, claims: Sequence[Claim], weights: Weights
) -> tuple[tuple[Claim, float], ...]:
    """What speaks for it, what against, and which ranks only lost others."""
    speaks_for = [(one, weights.of(one)) for one in (*best.claims, *best.places)]
    against = [(one, -weights.of(one)) for one in best.against]
    rest = [(one, 0.0) for one in claims if one.role == "consequence"]
    ordered = sorted((*speaks_for, *against), key=lambda pair: -abs(pair[1]))
    return tuple((one, round(weight, 3)) for one, weight in (*ordered, *rest)[:_EVIDENCE_MOST])


def _reason(best: Explanation, claims: Sequence[Claim]) -> str:
    said = best.lead.says
    place = next((one for one in best.places if one.says != said), None)
    if place is not None and not best.lead.ranks:
        said = f"{said}; {place.says}"
    lost = {r for one in claims if one.role == "consequence" for r in one.ranks} - set(best.ranks)
    if lost:
        told = ", ".join(map(str, sorted(lost)[:_TOLD_RANKS]))
        more = ", …" if len(lost) > _TOLD_RANKS else ""
        ranks = f"rank {told}" if len(lost) == 1 else f"{len(lost)} ranks ({told}{more})"
        said = f"{said}; {ranks} failed only because of that"
    again = next((one for one in best.claims if one.analyzer == _AGAIN), None)
    return f"{said}; {again.says}" if again is not None and again is not best.lead else said


def _doubt(best: Explanation, rest: Sequence[Explanation]) -> str:
    if rest and rest[0].score >= best.score - _HARDLY:
        return f"there is as much evidence for {rest[0].cause}: {rest[0].lead.says}"
    return "there is too little evidence for it"


def _is_transient(best: Explanation) -> bool | None:
    said = [one for one in best.claims if one.is_transient is not None]
    if any(one.analyzer == _AGAIN for one in said):
        return False  # it came again: whatever its kind, it does not pass by itself
    return max(said, key=lambda one: one.strength).is_transient if said else None


def _came_again(best: Explanation) -> bool:
    return any(one.analyzer == _AGAIN and one.kind == "same_failure" for one in best.claims)


def _fingerprint(best: Explanation) -> str:
    named = [one for one in best.claims if one.fingerprint and one.analyzer != _AGAIN]
    if named:
        return max(named, key=lambda one: one.strength).fingerprint
    return f"{best.cause}:{best.lead.kind}"


def _advice(best: Explanation, is_transient: bool | None, came_again: bool) -> Advice:
    match best.cause:
        case "user_code" | "configuration" | "data":
            # One more try: what looks deterministic is sometimes a file system's hiccup.
            return "stop" if came_again and is_transient is False else "restart"
        case "gpu" | "host" | "network":
            return "restart_without" if best.nodes and is_transient is not True else "restart"
        case "storage":
            return "inform" if is_transient is False else "restart"
        case "scheduler":
            if best.lead.kind in _WAITS_FOR_NODES:
                return "wait"
            return "stop" if best.lead.kind in {"operator", "cancelled"} else "restart"
        case "framework" | "unknown":
            return "restart"
        case _ as never:
            assert_never(never)


def _lacks(case: Case) -> tuple[str, ...]:
    """Evidence that is not there, with the reason; each kind once."""
    said: dict[tuple[str, str], list[str]] = {}
    for piece in case.evidence:
        if piece.missing:
            said.setdefault((piece.evidence, piece.missing), []).append(piece.node)
    return tuple(
        f"{kind} of {nodes[0] if len(nodes) == 1 else f'{len(nodes)} nodes'}: {why}"
        for (kind, why), nodes in list(said.items())[:_EVIDENCE_MOST]
    )
