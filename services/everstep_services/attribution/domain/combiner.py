"""Combines all claims about an incident into a verdict. Pure; its numbers are in `weights.toml`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from everstep.messages import Case
from everstep.verdict_causes import NODE_CAUSES, Advice, Retry, VerdictCause, retry_of
from everstep_services.attribution.domain.claims import (
    GENERAL,
    NODE_LOST,
    SUSPECTED,
    Claim,
    fingerprint_in,
    is_sound,
)
from everstep_services.attribution.domain.weights import Weights, shipped

_STRONG = 0.75
"""A rank that lost its peer may still be a root if a claim about it is at least this strong."""
_NEAR = 0.4  # of the strength of the lead: weaker claims name no ranks
_SAYS_NODES = 0.5  # the least strength of claims that name a node
NOT_OF_NODES = frozenset({"history", "stragglers"})
"""Analyzers whose knowledge of a node is of other times: it does not suffice to name the node."""


@dataclass(slots=True)
class Explanation:
    """One cause, with the claims for and against it."""

    cause: VerdictCause
    claims: list[Claim] = field(default_factory=list)
    places: list[Claim] = field(default_factory=list)
    """Claims that name its ranks, and no cause."""
    against: list[Claim] = field(default_factory=list)
    score: float = 0.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The culprits: the ranks that its strong claims name, else those of its places.

        A claim that is weak, or much weaker than the lead, may list ranks that were only elsewhere
        at that moment. Ranks that obeyed who ended the job on purpose are not culprits.
        """
        is_on_purpose = self.cause == "scheduler" and bool(self.claims) and not self.lead.ranks
        near = _NEAR * self.lead.strength
        named = [claim for claim in self.claims if claim.ranks and not is_on_purpose]
        least = max(near, min(max((claim.strength for claim in named), default=0.0), _STRONG))
        own = {rank for claim in named if claim.strength >= least for rank in claim.ranks}
        there = {rank for it in self.places if it.strength >= near for rank in it.ranks}
        return tuple(sorted(own or there))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that evidence accuses, for causes that can be a node's."""
        if self.cause not in NODE_CAUSES:
            return ()
        named = {
            node
            for claim in self.claims
            if claim.strength >= _SAYS_NODES and claim.analyzer not in NOT_OF_NODES
            for node in claim.nodes
        }
        cleared = {node for claim in self.against for node in claim.nodes}
        return tuple(sorted(named - cleared))

    @property
    def lead(self) -> Claim:
        """The strongest claim of the cause."""
        return max(self.claims or self.places, key=lambda claim: claim.strength)

    def takes(self, claim: Claim) -> bool:
        """Whether a claim has the same cause, or knows less about the same failure."""
        names = {own.fingerprint for own in self.claims} - {""}
        if claim.fingerprint in names and (claim.cause == "unknown" or claim.kind == GENERAL):
            return True
        is_of_anybody = claim.cause == "unknown" and not claim.ranks and not claim.nodes
        if is_of_anybody and claim.kind not in {own.kind for own in self.claims}:
            return False  # two unknown causes are not the same
        return claim.cause == self.cause and self.meets(claim)

    def explains(self, claim: Claim) -> bool:
        """Whether it explains a claim that leaves the cause open, about the same ranks.

        A fault that was injected explains all that is seen of its ranks and its node.
        """
        if self.cause == "injected":
            return self.meets(claim)
        ranks = {rank for own in self.claims for rank in own.ranks}
        is_open = claim.cause == "unknown" and self.cause != "unknown"
        return is_open and bool(ranks & set(claim.ranks))

    def meets(self, claim: Claim) -> bool:
        """Whether a claim may be about the same thing, by ranks and nodes."""
        if not claim.ranks and not claim.nodes:
            return True
        ranks = {rank for own in self.claims for rank in own.ranks}
        nodes = {node for own in self.claims for node in own.nodes}
        if not ranks and not nodes:
            return True
        return bool(ranks & set(claim.ranks) or nodes & set(claim.nodes))


def explanations(claims: Sequence[Claim], weights: Weights) -> list[Explanation]:
    """Return all explanations, the likeliest first."""
    roots = sorted(
        (claim for claim in claims if claim.role == "root" and not claim.is_against),
        key=lambda claim: (
            claim.analyzer == "history",  # its claims join those of others
            claim.cause != "injected",  # whatever else is seen of its ranks is its effect
            -weights.of(claim),
        ),
    )
    places = [claim for claim in claims if claim.role == "place" and not claim.is_against]
    candidates: list[Explanation] = []
    for claim in roots:
        same = next((candidate for candidate in candidates if candidate.takes(claim)), None)
        same = same or next(
            (candidate for candidate in candidates if candidate.explains(claim)), None
        )
        if same is None:
            same = Explanation(claim.cause)
            candidates.append(same)
        same.claims.append(claim)
    candidates += _places_alone(places, candidates)
    lost = {r for claim in claims if claim.role == "consequence" for r in claim.ranks}
    told = {r for root in roots if root.strength >= _STRONG for r in root.ranks}
    for candidate in candidates:
        candidate.against = [it for it in claims if it.is_against and _concerns(it, candidate)]
        _score(candidate, places, lost - told, weights)
    return sorted(candidates, key=lambda candidate: -candidate.score)


def _places_alone(places: Sequence[Claim], candidates: Sequence[Explanation]) -> list[Explanation]:
    """Explanations of unknown cause for the places that no other explanation covers."""
    explained = {
        rank for candidate in candidates for claim in candidate.claims for rank in claim.ranks
    }
    anywhere = any(not claim.ranks for candidate in candidates for claim in candidate.claims)
    left = [place for place in places if not (set(place.ranks) & explained or anywhere)]
    alone: list[Explanation] = []
    for claim in left:
        same = next((it for it in alone if set(it.places[0].ranks) & set(claim.ranks)), None)
        if same is None:
            alone.append(Explanation("unknown", places=[claim]))
        else:
            same.places.append(claim)
    return alone


def _concerns(claim: Claim, explanation: Explanation) -> bool:
    return claim.cause == explanation.cause and explanation.meets(claim)


def _score(
    explanation: Explanation, places: Sequence[Claim], lost: set[int], weights: Weights
) -> None:
    numbers = weights.score
    if explanation.claims:
        ranks = {rank for claim in explanation.claims for rank in claim.ranks}
        here = [it for it in places if not ranks or ranks & set(it.ranks)]
        explanation.places = here
        score = _together(explanation.claims, weights)
        score += numbers.same_place * _most(here, weights)
        if ranks and not here:
            # Ranks that are ending because of others stand elsewhere, too.
            rivals = [it for it in places if not set(it.ranks) <= lost]
            score -= numbers.other_place * _most(rivals, weights)
    else:
        ranks = set(explanation.ranks)
        score = numbers.place_alone * _together(explanation.places, weights)
    if ranks and ranks <= lost:
        score *= 1 - numbers.consequence
    score -= numbers.against * _most(explanation.against, weights)
    explanation.score = max(score, 0.0)


def _together(claims: Sequence[Claim], weights: Weights) -> float:
    """The strongest claim, and a part of each other analyzer's strongest one."""
    best: dict[str, float] = {}
    for claim in claims:
        best[claim.analyzer] = max(best.get(claim.analyzer, 0.0), weights.of(claim))
    ordered = sorted(best.values(), reverse=True)
    return ordered[0] + weights.score.agreement * sum(ordered[1:]) if ordered else 0.0


def _most(claims: Sequence[Claim], weights: Weights) -> float:
    return max((weights.of(claim) for claim in claims), default=0.0)


_ALTERNATIVES_MOST = 5
_EVIDENCE_MOST = 24
_RANKS_MOST = 256
_NODES_MOST = 64
_TOLD_RANKS = 8
_HARDLY = 0.05
_AGAIN = "history"
_CLEARLY = 0.6
_OF_ONE_RANK = frozenset({"user_code", "data", "configuration", "framework", "unknown"})
_MAY_FOLLOW = frozenset({"killed", "left_early", "aborted"})
"""Ends that may follow from another rank's failure."""
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
    return CaseJudgement(
        cause=best.cause,
        kind=best.lead.kind,
        confidence=round(confidence, 2),
        reason="; ".join([_reason(best, claims), *(f"also {it.lead.says}" for it in joint)]),
        advice=_retried(best) or _advice(best, is_transient, _came_again(best)),
        is_inconclusive=False,
        ranks=tuple(sorted({rank for it in (best, *joint) for rank in it.ranks}))[:_RANKS_MOST],
        nodes=tuple(sorted({node for it in (best, *joint) for node in it.nodes}))[:_NODES_MOST],
        is_transient=is_transient,
        retry=retry_of(
            best.cause, best.lead.kind, has_nodes=bool(best.nodes), is_transient=is_transient
        ),
        fingerprint=_fingerprint(best, job),
        evidence=weighed,
        others=considered,
        missing=missing,
    )


def _is_joint(other: Explanation, best: Explanation) -> bool:
    """Whether it is another failure, and no rival.

    It is about some of the culprits and of the same cause, or other ranks failed by themselves, or
    other nodes were lost at the same time.
    """
    if best.lead.kind == other.lead.kind == NODE_LOST:
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
    return explanation.cause in _OF_ONE_RANK and any(
        claim.analyzer == "ends"
        and claim.ranks
        and claim.strength >= _CLEARLY
        and claim.kind not in _MAY_FOLLOW
        for claim in explanation.claims
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
        why = f"it has less evidence ({explanation.score:.2f}) than {best.cause} ({best.score:.2f})"
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


def _reason(best: Explanation, claims: Sequence[Claim]) -> str:
    first = best.lead.says
    place = next((place for place in best.places if place.says != first), None)
    if place is not None and not best.lead.ranks:
        first = f"{first}; {place.says}"
    lost = {r for claim in claims if claim.role == "consequence" for r in claim.ranks} - set(
        best.ranks
    )
    if lost:
        told = ", ".join(map(str, sorted(lost)[:_TOLD_RANKS]))
        more = ", …" if len(lost) > _TOLD_RANKS else ""
        ranks = f"rank {told}" if len(lost) == 1 else f"{len(lost)} ranks ({told}{more})"
        first = f"{first}; {ranks} failed only because of that"
    again = next((claim for claim in best.claims if claim.analyzer == _AGAIN), None)
    return f"{first}; {again.says}" if again is not None and again is not best.lead else first


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


def _retried(best: Explanation) -> Advice | None:
    """Stop where a retry, or another one, is known to be useless, as NVRx's policies do."""
    kind = best.lead.kind
    is_useless = kind in _NEVER_AGAIN or (kind in _ONCE_AGAIN and _came_again(best))
    return "stop" if is_useless else None


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
