"""What ranks computed before they moved to other nodes, next to what they compute there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_sdk.numerics.agreement import RankPlace, bits, number
from trainer_sdk.numerics.judgement import (
    Kind,
    RankResults,
    ResultComparison,
    ResultJudgement,
    StepResult,
    is_plausible,
)
from trainer_sdk.numerics.skips import KeptResult, KeptStep
from trainer_sdk.numerics.statistics import UnexpectedResult

_Place = tuple[str, str]
"""A node, and a device of it."""


@dataclass(frozen=True, slots=True)
class MovedJudgement:
    """The judgement of a step that was computed again on other nodes."""

    judgement: ResultJudgement
    """Its ranks are those of the round before, unless `is_present`."""
    results: Sequence[RankResults]
    """What was kept, with what the same rank computes now as `elsewhere`."""
    is_present: bool = False
    """Whether the judgement is about the devices of the present round."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where the ranks were."""
        return [RankPlace(each.node, each.device, ()) for each in self.results]


def kept_step(
    unexpected: UnexpectedResult | None, results: Sequence[RankResults], round_: int
) -> KeptStep | None:
    """What is compared after a move; None if nothing is unexpected, or the inputs are not known."""
    if unexpected is None or not all(result.inputs for result in results):
        return None
    low, high = (None if end is None else bits(end) for end in (unexpected.low, unexpected.high))
    return KeptStep(
        round=round_,
        signal=unexpected.signal,
        value=bits(unexpected.value),
        low=low,
        high=high,
        moved_at=unexpected.moved_at,
        results=tuple(map(_kept, results)),
    )


def unexpected_of(kept: KeptStep) -> UnexpectedResult:
    """What was unexpected of the step."""
    signal: Any = kept.signal
    low, high = (None if end is None else number(end) for end in (kept.low, kept.high))
    return UnexpectedResult(signal, number(kept.value), low, high, kept.moved_at)


def judged_after_move(
    kept: KeptStep, results: Sequence[RankResults], comparison: ResultComparison
) -> MovedJudgement | str:
    """Compare the step with what is kept of it; why that is not possible, if it is not."""
    if len(kept.results) != len(results):
        return f"{len(results)} ranks make it, and {len(kept.results)} made it before"
    if any(old.inputs != now.inputs for old, now in zip(kept.results, results, strict=True)):
        return "its data, random numbers or parameters are others than before"
    joined = [
        RankResults(
            rank=now.rank, node=old.node, device=old.device, first=(first := _read(old)),
            again=(first,), elsewhere=now.reproduced, elsewhere_by=now.rank,
        )
        for old, now in zip(kept.results, results, strict=True)
    ]  # fmt: skip
    pairs = list(zip(joined, results, strict=True))
    differing = [(old, now) for old, now in pairs if comparison.differ(old.first, now.reproduced)]
    if not differing:
        return MovedJudgement(_reproduced(kept, pairs), joined)
    group = comparison.first_group((old.first, now.reproduced) for old, now in differing)
    return _differs(unexpected_of(kept), differing, group, joined)


def _reproduced(
    kept: KeptStep, pairs: Sequence[tuple[RankResults, RankResults]]
) -> ResultJudgement:
    unexpected = unexpected_of(kept)
    odd = [pair for pair in pairs if not is_plausible(unexpected, pair[0].first)]
    old, now = (odd or pairs)[0]
    where = f"on {_shown(_place(now))}" if _place(old) != _place(now) else "there once more"
    reason = (
        f"rank {old.rank} had loss {old.first.loss:.9g} on {_shown(_place(old))}, and has the same "
        f"{where}"
    )
    ranks = tuple(pair[0].rank for pair in odd)
    return ResultJudgement("correct_but_unexpected", ranks, "", reason)


def _differs(
    unexpected: UnexpectedResult,
    differing: Sequence[tuple[RankResults, RankResults]],
    group: str,
    joined: Sequence[RankResults],
) -> MovedJudgement:
    votes: Counter[_Place] = Counter()
    for old, now in differing:
        was_right, is_right = (is_plausible(unexpected, it) for it in (old.first, now.reproduced))
        if was_right != is_right:
            votes[_place(now if was_right else old)] += 1
    most = max(votes.values(), default=0)
    suspects = {place for place, count in votes.items() if count == most}
    # The step was in doubt where it was made first.
    suspects = suspects or {_place(old) for old, _ in differing}
    culprits = [old for old, _ in differing if _place(old) in suspects]
    is_present = not culprits
    culprits = culprits or [now for _, now in differing if _place(now) in suspects]
    ranks = tuple(culprit.rank for culprit in culprits)
    old, now = next(pair for pair in differing if pair[0].rank in ranks)
    is_same = all(_place(old) == _place(now) for old, now in differing)
    doubt = ", and nothing tells which of them is right" if len(suspects) > 1 else ""
    before, after = _values(old.first, now.reproduced)
    reason = (
        f"rank {old.rank} had {before} on {_shown(_place(old))}, and has {after} on "
        f"{_shown(_place(now))}, where it has moved{doubt}"
    )
    kind: Kind = "transient" if is_same else "persistent"
    return MovedJudgement(ResultJudgement(kind, ranks, group, reason), joined, is_present)


def _kept(result: RankResults) -> KeptResult:
    norm = result.reproduced.norm
    return KeptResult(
        node=result.node,
        device=result.device,
        inputs=result.inputs,
        loss=bits(result.reproduced.loss),
        norm=None if norm is None else bits(norm),
        hashes=result.reproduced.hashes,
    )


def _read(kept: KeptResult) -> StepResult:
    norm = None if kept.norm is None else number(kept.norm)
    return StepResult(number(kept.loss), norm, kept.hashes)


def _values(before: StepResult, after: StepResult) -> tuple[str, str]:
    """What is shown of two results: the losses, or else the norms of their gradients."""
    if before.norm is None or after.norm is None or repr(before.loss) != repr(after.loss):
        return f"loss {before.loss:.9g}", f"{after.loss:.9g}"
    other = "other gradients of this norm" if before.norm == after.norm else f"{after.norm:.9g}"
    return f"gradient norm {before.norm:.9g}", other


def _place(result: RankResults) -> _Place:
    return result.node, result.device


def _shown(place: _Place) -> str:
    return f"{place[0]} ({place[1]})" if place[1] else place[0]
