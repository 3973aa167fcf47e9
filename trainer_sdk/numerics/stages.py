"""Which of the ranks that need each other's results in a step computed something else first."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_sdk.numerics.judgement import StepResult

_WAYS = 4


def first_to_differ(pairs: "Mapping[int, tuple[StepResult, StepResult]]") -> set[int]:
    """The ranks that gave something else than before although they got the same.

    `pairs` has two results of each rank. Forward comes before the loss, and the loss before
    backward: what is wrong there makes all after it differ. Empty if the results do not tell.
    """
    if not all(first.passes and len(first.passes) == len(second.passes)
               for first, second in pairs.values()):  # fmt: skip
        return set()
    ranks = {rank: _Differences(*pair) for rank, pair in pairs.items()}
    forward = {rank for rank, it in ranks.items() if it.is_first_forward}
    loss = {rank for rank, it in ranks.items() if it.is_first_in_loss}
    return forward or loss or {rank for rank, it in ranks.items() if it.is_first_backward}


def round_alike(pairs: "Mapping[int, tuple[StepResult, StepResult]]") -> bool:
    """Whether any module gave the same, bit for bit, for the same, as without rounding."""
    return any(
        first.passes[at : at + 2] == second.passes[at : at + 2] != (0, 0)
        for first, second in pairs.values()
        for at in range(0, len(first.passes), _WAYS)
    )


class _Differences:
    """What differs between two results of a rank."""

    def __init__(self, first: "StepResult", second: "StepResult") -> None:
        differ = [one != other for one, other in zip(first.passes, second.passes, strict=True)]
        modules = [differ[at : at + _WAYS] for at in range(0, len(differ), _WAYS)]
        got, gave, got_back, _ = (any(way) for way in zip(*modules, strict=True))
        self.is_first_forward = any(each[1] and not each[0] for each in modules)
        self.is_first_in_loss = not got and not gave and repr(first.loss) != repr(second.loss)
        self.is_first_backward = any(each[3] and not any(each[:3]) for each in modules) or (
            first.hashes != second.hashes and not (got or gave or got_back)
        )
