"""Reads the numbers of the combiner from `weights.toml`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

from everstep_services.attribution.domain.claims import Claim


class ConfidenceWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a score becomes a probability."""

    bias: float
    slope: float
    rival: float
    least: float
    most: float


class ScoreWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How claims add up."""

    agreement: float
    same_place: float
    other_place: float
    place_alone: float
    against: float
    consequence: float


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All numbers of the combiner."""

    confidence: ConfidenceWeights
    score: ScoreWeights
    analyzers: Mapping[str, float]
    kinds: Mapping[str, float]

    def of(self, claim: Claim) -> float:
        """The weight of a claim, 0 to 1."""
        name = f"{claim.analyzer}.{claim.kind}"
        trust = self.analyzers.get(claim.analyzer, self.analyzers["other"])
        return claim.strength * self.kinds.get(name, trust)


@cache
def shipped() -> Weights:
    """The numbers that come with Everstep."""
    text = resources.files(__package__).joinpath("weights.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Weights)
