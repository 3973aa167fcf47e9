"""Groups the claims about an incident into explanations, and scores them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.verdict_causes import NODE_CAUSES, VerdictCause
from everstep_services.attribution.domain.claims import GENERAL, WARDEN_ENDED, Claim
from everstep_services.attribution.domain.weights import Weights

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
        at that moment. Ranks that obeyed who ended the job on purpose, or that ended with their
        warden, are not culprits.
        """
        is_of_nobody = self.cause == "scheduler" or self.lead.kind == WARDEN_ENDED
        is_on_purpose = is_of_nobody and bool(self.claims) and not self.lead.ranks
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
