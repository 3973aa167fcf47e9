"""Who or what computed an unexpected result: from the first results, re-runs here and elsewhere.

All ranks have all results, and come to the same judgement.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, Literal, get_args

from trainer_sdk.numerics.stages import first_to_differ, round_alike
from trainer_sdk.numerics.statistics import UnexpectedResult

Kind = Literal[
    "transient",
    "persistent",
    "correct_but_unexpected",
    "not_reproducible_and_not_local",
    "replica_differs",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

ROUNDING: Final = 5e-2
"""Relative differences up to here may be rounding, where algorithms are not deterministic: some
units in the last place of bfloat16."""
_Computer = tuple[str, int]
"""The rank, or the ranks that compute one replica together."""

_FAR = 4.0
"""A fault is this much larger than the largest difference between two re-runs of any rank."""
_FAR_ALONE = 96.0
"""Added to it where a single rank's re-runs are all there is to compare with. The more ranks there
are, the surer the largest of their differences is not far below the usual one."""
_FAR_APART = 100.0
"""How much more a rank's re-runs differ than those of others, if it alone is at fault."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a rank computed in a step."""

    loss: float
    norm: float | None
    hashes: tuple[int, ...]
    """Of the gradients, by parameter group; empty if not known, or not of the same sums."""
    passes: tuple[int, ...] = ()
    """As of `ModulePasses`, where ranks may need each other's results; else empty."""


@dataclass(frozen=True, slots=True)
class RankResults:
    """All results of a rank's step."""

    rank: int
    node: str
    device: str
    first: StepResult
    again: tuple[StepResult, ...]
    elsewhere: StepResult | None
    """Of this rank's batch and snapshot, by rank `elsewhere_by`."""
    elsewhere_by: int | None
    replica: int | None = None
    """Equal on ranks whose computation of a step depends on each other's, as stages of a pipeline
    do; None for a rank that depends on none."""
    inputs: str = ""
    """A hash of all that the results depend on; empty if that is not known."""

    @property
    def computer(self) -> _Computer:
        """The ranks that computed it: this one, or all of its replica."""
        return ("rank", self.rank) if self.replica is None else ("replica", self.replica)

    @property
    def reproduced(self) -> StepResult:
        """The result to compare others with: its gradients are those of this rank alone."""
        return self.again[0] if self.again else self.first


@dataclass(frozen=True, slots=True)
class ResultJudgement:
    """Why a result was unexpected, and which ranks it came from."""

    kind: Kind
    ranks: tuple[int, ...]
    """Several if the results do not tell which of them; none if they do not tell at all."""
    group: str
    """The first parameter group that differs; empty if that is not known."""
    reason: str
    is_open: bool = False
    """Whether another device could still compute something else: none was asked."""


def judge(
    unexpected: UnexpectedResult | None,
    results: Sequence[RankResults],
    groups: Sequence[str],
    rounding: float = ROUNDING,
    usual_loss: float = 0.0,
) -> ResultJudgement | None:
    """Return the judgement; None if a step with an expected result was reproduced.

    `rounding` is 0.0 where the training uses deterministic algorithms: then every bit counts.
    Otherwise differences are relative to the result, or to `usual_loss` if that is larger.
    """
    results = sorted(results, key=lambda result: result.rank)
    comparison = ResultComparison(results, groups, rounding, usual_loss)
    return (
        _not_reproduced(results, comparison)
        or _differs_elsewhere(unexpected, results, comparison)
        or _reproduced(unexpected, results)
    )


def decided(
    judgement: ResultJudgement, rank: int, results: Sequence[RankResults]
) -> ResultJudgement:
    """The judgement about this one of its ranks: its device is wrong by its own measure, too."""
    named = next(result for result in results if result.rank == rank)
    reason = (
        f"rank {rank} on {_device(named)} computes something else than another device does, and "
        f"than itself in double precision: it has {_values(named)} (rank {named.elsewhere_by})"
    )
    return replace(judgement, ranks=(rank,), reason=reason)


def odd_one_out(
    hashes: Mapping[int, tuple[int, ...]], groups: Sequence[str]
) -> ResultJudgement | None:
    """Return which replicas differ from the others; None if all are equal."""
    ranks_by_hashes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(hashes):
        ranks_by_hashes[hashes[rank]].append(rank)
    if len(ranks_by_hashes) < 2:
        return None
    most, majority = max(ranks_by_hashes.items(), key=lambda item: len(item[1]))
    group = _first_difference(list(ranks_by_hashes), groups)
    where = f", first in {group}" if group else ""
    if 2 * len(majority) <= len(hashes):
        ranks = tuple(sorted(hashes))
        text = f"the parameters of {_shown(ranks)} should be equal and are not{where}; "
        return ResultJudgement("replica_differs", ranks, group, text + "no majority tells which")
    ranks = tuple(rank for rank in sorted(hashes) if hashes[rank] != most)
    group = _first_difference([most, *(hashes[rank] for rank in ranks)], groups)
    verb = "differ" if len(ranks) == 1 else "all differ"
    text = f"the parameters of {_shown(ranks)} {verb} from those of {len(majority)} other replicas"
    return ResultJudgement("replica_differs", ranks, group, f"{text}, first in {group}")


class ResultComparison:
    """Tells results apart by more than rounding does."""

    def __init__(
        self,
        results: Sequence[RankResults],
        groups: Sequence[str],
        rounding: float,
        usual_loss: float,
    ) -> None:
        self._groups = groups
        self._is_exact = rounding == 0.0
        self._rounding = rounding
        # A sum that cancels out is small, and its rounding is not.
        self._loss = max(usual_loss, _usual(result.first.loss for result in results))
        self._norm = _usual(result.first.norm or 0.0 for result in results)
        far = _FAR + _FAR_ALONE / max(1, len(results)) ** 2
        self._noise = 0.0 if self._is_exact else far * max(map(self._repeated, results), default=0)

    def differ(self, first: StepResult, second: StepResult) -> bool:
        """Whether two results of the same input differ by more than rounding."""
        if self._is_exact:
            return _bits_differ(first, second)
        return self._distance(first, second) > max(self._rounding, self._noise)

    def irreproducible(self, results: Sequence[RankResults]) -> list[RankResults]:
        """Return the ranks whose re-runs differ from each other by more than rounding.

        Where algorithms are not deterministic, few such ranks count only if they stand out.
        """
        repeated = [result for result in results if len(result.again) > 1]
        if self._is_exact:
            return [each for each in repeated if _bits_differ(each.again[0], each.again[1])]
        unstable = [each for each in repeated if self._repeated(each) > self._rounding]
        if 2 * len(unstable) > len(results):
            return unstable
        usual = median([self._repeated(each) for each in repeated if each not in unstable] or [0.0])
        return [each for each in unstable if self._repeated(each) > _FAR_APART * usual]

    def first_group(self, pairs: Iterable[tuple[StepResult, StepResult]]) -> str:
        if not self._is_exact:
            return ""  # rounding makes all of them differ
        names = [
            _first_difference([first.hashes, second.hashes], self._groups)
            for first, second in pairs
            if first.hashes and second.hashes
        ]
        return min(filter(None, names), key=list(self._groups).index, default="")

    def local_ranks(
        self, changed: Sequence[RankResults], results: Sequence[RankResults]
    ) -> tuple[int, ...]:
        """Return the ranks the difference is local to; a reduced sum differs on all of them.

        Of a replica that several ranks compute, a later stage has the loss of an earlier one's
        fault, and an earlier one the gradients of a later one's.
        """
        if all(result.again[0].passes == result.again[-1].passes for result in results):
            first = first_to_differ({each.rank: (each.first, each.again[0]) for each in results})
            if first:
                return tuple(sorted(first))
        parts = [
            tuple(
                result.rank
                for result in changed
                if self.differ(_part(result.first, field), _part(result.again[0], field))
            )
            for field in ("loss", "norm", "hashes")
        ]
        ranks = min(filter(None, parts), key=len, default=())
        if len(ranks) == len(results) > 1:
            return ()
        computers = {result.computer for result in results if result.rank in ranks}
        return tuple(result.rank for result in results if result.computer in computers)

    def odd_stage(
        self, culprits: Iterable[RankResults], asked: Iterable[tuple[RankResults, StepResult]]
    ) -> list[RankResults]:
        """Return those whose part of a step is the first that differs elsewhere, if known."""
        pairs = {result.rank: (result.reproduced, elsewhere) for result, elsewhere in asked}
        if not self._is_exact and not round_alike(pairs):
            return []  # rounding may differ from device to device
        first = first_to_differ(pairs)
        others = {result.elsewhere_by for result, _ in asked if result.rank in first}
        return [result for result in culprits if result.rank in first | others]

    def _repeated(self, result: RankResults) -> float:
        if len(result.again) < 2:
            return 0.0
        return self._distance(result.again[0], result.again[1])

    def _distance(self, first: StepResult, second: StepResult) -> float:
        distance = relative_difference(first.loss, second.loss, self._loss)
        if first.norm is not None and second.norm is not None:
            distance = max(distance, relative_difference(first.norm, second.norm, self._norm))
        return distance


def _not_reproduced(
    results: Sequence[RankResults], comparison: ResultComparison
) -> ResultJudgement | None:
    unstable = comparison.irreproducible(results)
    if unstable:
        values = _values(unstable[0])
        group = comparison.first_group((result.again[0], result.again[1]) for result in unstable)
        if 2 * len(unstable) < len(results):
            ranks = tuple(result.rank for result in unstable)
            reason = (
                f"each computation of {_shown(ranks)} gave another result ({values}), those of the "
                "other ranks did not"
            )
            return ResultJudgement("transient", ranks, group, reason)
        count = f"{len(unstable)} of {len(results)} ranks"
        reason = f"re-runs of the same input differ from each other on {count} ({values})"
        return ResultJudgement("not_reproducible_and_not_local", (), group, reason)
    changed = [
        result
        for result in results
        if result.again and all(comparison.differ(result.first, again) for again in result.again)
    ]
    if not changed:
        return None
    group = comparison.first_group((result.first, result.again[0]) for result in changed)
    ranks = comparison.local_ranks(changed, results)
    named = next((result for result in results if result.rank in ranks), None)
    shown = next((result for result in changed if result.rank in ranks), changed[0])
    where = f"{_shown(ranks)} on {_device(named)}" if named else "a rank that is not known"
    whose = f"rank {shown.rank} has " if named not in (shown, None) else ""
    reason = f"the result of {where} was not reproduced: {whose}{_values(shown)}"
    return ResultJudgement("transient", ranks, group, reason)


def _differs_elsewhere(
    unexpected: UnexpectedResult | None,
    results: Sequence[RankResults],
    comparison: ResultComparison,
) -> ResultJudgement | None:
    asked = [(result, result.elsewhere) for result in results if result.elsewhere is not None]
    differing = [
        (result, elsewhere)
        for result, elsewhere in asked
        if comparison.differ(result.reproduced, elsewhere)
    ]
    if not differing:
        return None
    computers = {result.rank: result.computer for result in results}
    pairs = {(result.computer, _computer_elsewhere(result, computers)) for result, _ in differing}
    every_pair = {(result.computer, _computer_elsewhere(result, computers)) for result, _ in asked}
    suspects = _common(pairs) or _implausible(unexpected, differing, computers)
    if not suspects and len(pairs) > 2 and pairs == every_pair:
        reason = f"no rank's result is the same on another device: {_values(differing[0][0])}"
        return ResultJudgement("not_reproducible_and_not_local", (), "", reason)
    suspects = suspects or {computer for pair in pairs for computer in pair if computer}
    culprits = [result for result in results if result.computer in suspects]
    culprits = comparison.odd_stage(culprits, asked) or culprits
    group = comparison.first_group((result.reproduced, other) for result, other in differing)
    ranks = tuple(result.rank for result in culprits)
    pair = next((pair for pair in differing if pair[0].rank in ranks), differing[0])[0]
    where = f"{_shown(ranks)} on {_device(culprits[0])}"
    doubt = ", and nothing tells which of them is right" if len(suspects) > 1 else ""
    verb = "computes" if len(ranks) == 1 else "compute"
    reason = (
        f"{where} {verb} something else than another device does{doubt}: "
        f"rank {pair.rank} has {_values(pair)} (rank {pair.elsewhere_by})"
    )
    return ResultJudgement("persistent", ranks, group, reason)


def _computer_elsewhere(
    result: RankResults, computers: Mapping[int, _Computer]
) -> _Computer | None:
    return None if result.elsewhere_by is None else computers.get(result.elsewhere_by)


def _common(pairs: Iterable[tuple[_Computer, _Computer | None]]) -> set[_Computer]:
    """Return who takes part in more of the differing pairs than all others, if there is someone."""
    counts = Counter(computer for pair in pairs for computer in pair if computer)
    most = max(counts.values())
    common = {computer for computer, count in counts.items() if count == most}
    return common if most > 1 and len(common) == 1 else set()


def _implausible(
    unexpected: UnexpectedResult | None,
    differing: Sequence[tuple[RankResults, StepResult]],
    computers: Mapping[int, _Computer],
) -> set[_Computer]:
    """Return who computed a value outside the expected band where another one did not."""
    votes: Counter[_Computer] = Counter()
    for result, elsewhere in differing:
        here, there = (
            is_plausible(unexpected, values) for values in (result.reproduced, elsewhere)
        )
        computer = result.computer if there else _computer_elsewhere(result, computers)
        if here != there and computer:
            votes[computer] += 1
    most = max(votes.values(), default=0)
    return {computer for computer, count in votes.items() if count == most}


def _reproduced(
    unexpected: UnexpectedResult | None, results: Sequence[RankResults]
) -> ResultJudgement | None:
    if unexpected is None:
        return None
    is_open = all(result.elsewhere is None for result in results)
    odd = [result for result in results if not is_plausible(unexpected, result.first)]
    ranks = tuple(result.rank for result in odd)
    place = "here" if is_open else "here and on another device"
    shown = odd[0] if odd else results[0]
    reason = (
        f"each computation {place} gave the same result: rank {shown.rank} has {_values(shown)}"
    )
    return ResultJudgement("correct_but_unexpected", ranks, "", reason, is_open)


def is_plausible(unexpected: UnexpectedResult | None, result: StepResult) -> bool:
    """Whether a rank's own result is finite, and within the band of an unexpected one."""
    if not math.isfinite(result.loss) or not math.isfinite(result.norm or 0.0):
        return False
    if unexpected is None or unexpected.low is None or unexpected.high is None:
        return True
    # A norm of one rank's gradients has another scale than the band, which is of their mean.
    # What a model returned was not computed again.
    return unexpected.signal in ("grad_norm_spike", "output_spike") or (
        unexpected.low <= result.loss <= unexpected.high
    )


def _part(result: StepResult, field: str) -> StepResult:
    return StepResult(
        result.loss if field == "loss" else 0.0,
        result.norm if field == "norm" else None,
        result.hashes if field == "hashes" else (),
    )


def _bits_differ(first: StepResult, second: StepResult) -> bool:
    return (
        relative_difference(first.loss, second.loss) > 0
        or (
            first.norm is not None
            and second.norm is not None
            and relative_difference(first.norm, second.norm) > 0
        )
        or (bool(first.hashes and second.hashes) and first.hashes != second.hashes)
    )


def _usual(values: Iterable[float]) -> float:
    return median([abs(value) for value in values if math.isfinite(value)] or [0.0])


def relative_difference(first: float, second: float, least: float = 0.0) -> float:
    """Return the difference relative to the larger value, or to `least` if that is larger still.

    It is infinite if only one of them is a finite number.
    """
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second), least)


def _first_difference(hashes: Sequence[tuple[int, ...]], groups: Sequence[str]) -> str:
    for name, values in zip(groups, zip(*hashes, strict=True), strict=True):
        if len(set(values)) > 1:
            return name
    return ""


def _values(result: RankResults) -> str:
    """Return the losses; the norms where the losses are equal and they are not."""
    every = [result.first, *result.again, *([result.elsewhere] if result.elsewhere else [])]
    name, values = "loss", [other.loss for other in every]
    norms = [other.norm for other in every if other.norm is not None]
    if len(set(map(repr, values))) == 1 and len(norms) == len(every) and len(set(norms)) > 1:
        name, values = "gradient norm", norms
    first, *more = (f"{value:.9g}" for value in values)
    text = f"{name} {first}"
    if again := more[: len(result.again)]:
        text += f", again {' and '.join(again)}"
    if result.elsewhere:
        text += f", elsewhere {more[-1]}"
    return text


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''}"


def _device(result: RankResults) -> str:
    return f"{result.node} ({result.device})" if result.device else result.node
