"""Combines all claims about an incident into a verdict. Pure; its numbers are in `weights.toml`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from everstep.messages import Case
from everstep.verdict_causes import Advice, Retry, VerdictCause, retry_of
from everstep_services.attribution.domain.claims import (
    NODE_LOST,
    SUSPECTED,
    Claim,
    fingerprint_in,
    is_sound,
)
from everstep_services.attribution.domain.explanations import (
    NOT_OF_NODES,
    Explanation,
    explanations,
)
from everstep_services.attribution.domain.weights import Weights, shipped

_ALTERNATIVES_MOST = 5
_EVIDENCE_MOST = 24
_RANKS_MOST = 256
_NODES_MOST = 64
_TOLD_RANKS = 8
_HARDLY = 0.05
_AGAIN = "history"
_CLEARLY = 0.6
_OF_ONE_RANK = frozenset({"user_code", "data", "configuration", "framework", "unknown"})
_MAY_FOLLOW = frozenset({"left_early", "aborted"})
"""Ends that may follow from another rank's failure."""
_SEEN = frozenset({NODE_LOST, "stopped_process", "host_oom", "illegal_instruction"})
"""Failures of a host that the kernel or the bus has seen: they follow from no rank's failure."""
_SEES = frozenset({"ends", "stalls", "node_state"})
_BY_URGENCY: tuple[Retry, ...] = ("never", "after_change", "without_node", "unknown", "as_is")
"""Of several failures at once, the first of these decides what another attempt needs."""
_NEVER_AGAIN = frozenset({"gpu_oom"})
"""The same batch does not fit next time, either."""
_ONCE_AGAIN = frozenset({"port_taken"})
_WAITS_FOR_NODES = frozenset({"preempted", "time_limit", "quota"})


@dataclass(frozen=True, slots=True)
class Considered:
    """Another explanation, and why it was not chosen."""

    cause: VerdictCause
    confidence: float
    reason: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseJudgement:
    """The result of combining the claims."""

    cause: VerdictCause
    kind: str
    confidence: float
    reason: str
    advice: Advice
    is_inconclusive: bool
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    is_transient: bool | None = None
    retry: Retry = "unknown"
    fingerprint: str = ""
    evidence: tuple[tuple[Claim, float], ...] = ()
    """Claims with their weights; below 0 for claims against the verdict."""
    others: tuple[Considered, ...] = ()
    missing: tuple[str, ...] = ()


def combine(case: Case, claims: Sequence[Claim], missing: Sequence[str]) -> CaseJudgement:
    """Return the verdict. Claims that cannot be weighed are left out, and named."""
    weights = shipped()
    sound = [claim for claim in claims if is_sound(claim)]
    bad = sorted({claim.analyzer for claim in claims} - {claim.analyzer for claim in sound})
    unclear = tuple(f"{name}: its claims have invalid values" for name in bad)
    candidates = explanations(sound, weights)
    lacks = (*missing, *unclear, *_lacks(case))
    if not candidates:
        reason = f"inconclusive: there is no evidence for a cause of {case.trigger or 'the end'}"
        return CaseJudgement(
            "unknown", "", 0.0, reason, "restart", is_inconclusive=True, missing=lacks
        )
    return _judged(candidates, sound, lacks, weights, case.job)


def _judged(
    candidates: Sequence[Explanation],
    claims: Sequence[Claim],
    missing: tuple[str, ...],
    weights: Weights,
    job: str,
) -> CaseJudgement:
    best = candidates[0]
    joint = [other for other in candidates[1:] if _is_joint(other, best)]
    rest = [other for other in candidates[1:] if other not in joint]
    rivals = [
        other
        for other in candidates[1:]
        if (other in rest or other.cause != best.cause) and not _is_of_other_times(other)
    ]
    confidence = _confidence(best, rivals[0] if rivals else None, weights)
    is_unsure = confidence < weights.confidence.least
    others = rest if not is_unsure else [best, *rest]
    considered = tuple(
        _considered(other, best, confidence, weights) for other in others[:_ALTERNATIVES_MOST]
    )
    weighed = _evidence(best, claims, weights)
    if is_unsure:
        reason = f"inconclusive: {best.lead.says}, but {_doubt(best, rest)}"
        return CaseJudgement(
            "unknown", best.lead.kind, round(confidence, 2), reason, "restart",
            is_inconclusive=True,            evidence=weighed, others=considered, missing=missing,
        )  # fmt: skip
    is_transient = _is_transient(best)
    nodes = tuple(sorted({node for it in (best, *joint) for node in it.nodes}))
    retry = min((_retry(it) for it in (best, *joint)), key=_BY_URGENCY.index)
    return CaseJudgement(
        cause=best.cause,
        kind=best.lead.kind,
        confidence=round(confidence, 2),
        reason=_reason(best, joint, rest, claims),
        advice=_advised(best, retry, has_nodes=bool(nodes)),
        is_inconclusive=False,
        ranks=tuple(sorted({rank for it in (best, *joint) for rank in it.ranks}))[:_RANKS_MOST],
        nodes=nodes[:_NODES_MOST],
        is_transient=is_transient,
        retry=retry,
        fingerprint=_fingerprint(best, job),
        evidence=weighed,
        others=considered,
        missing=missing,
    )


def _is_joint(other: Explanation, best: Explanation) -> bool:
    """Whether it is another failure, and no rival.

    It is about some of the culprits and of the same cause, or evidence of its own shows that other
    ranks failed by themselves, that other nodes were lost, or that another fault was injected.
    """
    if best.lead.kind == other.lead.kind == NODE_LOST or best.cause == other.cause == "injected":
        return True
    ranks, bests = {rank for own in other.claims for rank in own.ranks}, set(best.ranks)
    is_of_them = other.cause == best.cause and bool(ranks) and ranks <= bests
    return is_of_them or (_failed_itself(other) and _failed_itself(best) and not ranks & bests)


def _is_of_other_times(explanation: Explanation) -> bool:
    """Whether nothing of this incident speaks for it: such a rival raises no doubt."""
    claims = explanation.claims
    return bool(claims) and all(
        claim.analyzer in NOT_OF_NODES or claim.kind == SUSPECTED for claim in claims
    )


def _failed_itself(explanation: Explanation) -> bool:
    """Whether its ranks ended by a failure of their own, which no other rank's end explains."""
    clear = [it for it in explanation.claims if it.ranks and it.strength >= _CLEARLY]
    return any(
        claim.kind in _SEEN
        if claim.cause == "host" and claim.analyzer in _SEES
        else claim.analyzer == "ends"
        and claim.cause in _OF_ONE_RANK
        and claim.kind not in _MAY_FOLLOW
        for claim in clear
    )


def _confidence(best: Explanation, rival: Explanation | None, weights: Weights) -> float:
    numbers = weights.confidence
    against = numbers.rival * rival.score if rival else 0.0
    odds = numbers.bias + numbers.slope * best.score - against
    return min(1 / (1 + math.exp(-odds)), numbers.most)


def _considered(
    explanation: Explanation, best: Explanation, confidence: float, weights: Weights
) -> Considered:
    own = _confidence(explanation, best, weights) if explanation is not best else confidence
    if explanation is best:
        why = "the likeliest cause, but not likely enough"
    elif explanation.against:
        why = f"against it: {explanation.against[0].says}"
    else:
        own_score, score = round(explanation.score, 2), round(best.score, 2)
        less = "less" if own_score < score else "no more"
        why = f"it has {less} evidence ({own_score:.2f}) than {best.cause} ({score:.2f})"
    return Considered(
        explanation.cause, round(own, 2), f"{explanation.lead.says}; {why}",
        explanation.ranks[:_TOLD_RANKS], explanation.nodes[:_TOLD_RANKS],
    )  # fmt: skip


def _evidence(
    best: Explanation, claims: Sequence[Claim], weights: Weights
) -> tuple[tuple[Claim, float], ...]:
    """The claims for the best explanation, the claims against it, and the consequences."""
    speaks_for = [(claim, weights.of(claim)) for claim in (*best.claims, *best.places)]
    against = [(claim, -weights.of(claim)) for claim in best.against]
    rest = [(claim, 0.0) for claim in claims if claim.role == "consequence"]
    ordered = sorted((*speaks_for, *against), key=lambda pair: -abs(pair[1]))
    once = {
        (it.analyzer, it.says, it.fact): (it, weight) for it, weight in reversed((*ordered, *rest))
    }
    told = list(reversed(once.values()))[:_EVIDENCE_MOST]
    return tuple((claim, round(weight, 3)) for claim, weight in told)


def _reason(
    best: Explanation,
    joint: Sequence[Explanation],
    rest: Sequence[Explanation],
    claims: Sequence[Claim],
) -> str:
    first = best.lead.says
    place = next((place for place in best.places if place.says != first), None)
    if place is not None and not best.lead.ranks:
        first = f"{first}; {place.says}"
    parts = [first, *(f"also {it.lead.says}" for it in joint)]
    by_themselves = [it for it in rest if _failed_itself(it)]
    failed = {rank for it in (best, *joint, *by_themselves) for rank in it.ranks}
    lost = {r for it in claims if it.role == "consequence" for r in it.ranks} - failed
    if lost:
        told = ", ".join(map(str, sorted(lost)[:_TOLD_RANKS]))
        more = ", …" if len(lost) > _TOLD_RANKS else ""
        ranks = f"rank {told}" if len(lost) == 1 else f"{len(lost)} ranks ({told}{more})"
        why = "lost another rank" if joint or by_themselves else "failed only because of that"
        parts.append(f"{ranks} {why}")
    again = next((claim for claim in best.claims if claim.analyzer == _AGAIN), None)
    if again is not None and again is not best.lead:
        parts.append(again.says)
    return "; ".join(parts)


def _doubt(best: Explanation, rest: Sequence[Explanation]) -> str:
    if rest and rest[0].score >= best.score - _HARDLY:
        return f"there is as much evidence for {rest[0].cause}: {rest[0].lead.says}"
    return "there is too little evidence for it"


def _is_transient(best: Explanation) -> bool | None:
    if best.cause == "injected":
        return True
    judged = [claim for claim in best.claims if claim.is_transient is not None]
    if any(claim.analyzer == _AGAIN for claim in judged):
        return False  # a failure that came again does not pass by itself
    return max(judged, key=lambda claim: claim.strength).is_transient if judged else None


def _came_again(best: Explanation) -> bool:
    return any(claim.analyzer == _AGAIN and claim.kind == "same_failure" for claim in best.claims)


def _fingerprint(best: Explanation, job: str) -> str:
    """The name of what the lead says; else of another claim about its ranks, no victim's."""
    named = [
        claim
        for claim in best.claims
        if claim.fingerprint
        and claim.analyzer != _AGAIN
        and (claim is best.lead or {*claim.ranks} & {*best.lead.ranks})
    ]
    strongest = max(named, key=lambda claim: claim.strength, default=best.lead)
    name = best.lead.fingerprint or strongest.fingerprint
    return fingerprint_in(job, name or ":".join((best.cause, best.lead.kind, *best.nodes)))


def _retry(explanation: Explanation) -> Retry:
    return retry_of(
        explanation.cause,
        explanation.lead.kind,
        has_nodes=bool(explanation.nodes),
        is_transient=_is_transient(explanation),
    )


def _advised(best: Explanation, retry: Retry, *, has_nodes: bool) -> Advice:
    """The advice for the likeliest cause; it does not contradict what another attempt needs."""
    kind, came_again = best.lead.kind, _came_again(best)
    if kind in _NEVER_AGAIN or (kind in _ONCE_AGAIN and came_again):
        return "stop"  # a retry, or another one, is known to be useless, as in NVRx's policies
    advice = _advice(best, _is_transient(best), came_again)
    if advice not in {"restart", "restart_without"}:
        return advice
    if retry == "without_node":
        return "restart_without" if has_nodes else "restart_elsewhere"
    return "change" if retry == "after_change" else advice


def _advice(best: Explanation, is_transient: bool | None, came_again: bool) -> Advice:
    match best.cause:
        case "user_code" | "configuration" | "data":
            # One more try: what looks deterministic may have been a hiccup of a file system.
            return "stop" if came_again and is_transient is False else "restart"
        case "gpu" | "host" | "network":
            return "restart_without" if best.nodes and is_transient is not True else "restart"
        case "storage":
            return "inform" if is_transient is False else "restart"
        case "scheduler":
            if best.lead.kind in _WAITS_FOR_NODES:
                return "wait"
            return "stop" if best.lead.kind in {"operator", "cancelled"} else "restart"
        case "framework" | "injected" | "unknown":
            return "restart"
        case _ as never:
            assert_never(never)


def _lacks(case: Case) -> tuple[str, ...]:
    """Missing evidence, with the reason; each kind once."""
    names: dict[tuple[str, str], list[str]] = {}
    for piece in case.evidence:
        if piece.missing:
            names.setdefault((piece.evidence, piece.missing), []).append(piece.node)
    return tuple(
        f"{kind} of {nodes[0] if len(nodes) == 1 else f'{len(nodes)} nodes'}: {why}"
        for (kind, why), nodes in list(names.items())[:_EVIDENCE_MOST]
    )
