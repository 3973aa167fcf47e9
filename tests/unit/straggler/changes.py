"""What the domain may say of a job's ranks, made up."""

from collections.abc import Iterable
from typing import Any

from everstep.messages import Score
from everstep_services.straggler.domain.changes import (
    Change,
    Cost,
    KeepsUp,
    SlowRankFound,
    StepsShifted,
)


def slow(rank: int = 3, round_: int = 1, **more: Any) -> SlowRankFound:
    return SlowRankFound(
        **{
            "round": round_,
            "rank": rank,
            "node": f"n{rank // 2}",
            "slot": rank // 2,
            "role": "",
            "cause": "input",
            "reason": "20 % above the median of 8 ranks",
            "section": "data",
            "scores": (Score(signal="own", relative_score=0.8),),
            "lateness_s": 0.1,
            "slower_ratio": 0.2,
            "lost_s": 0.05,
            "slowdown_ratio": 0.25,
            "windows": 3,
            "confidence": 0.9,
            "first_step": 33,
            "last_step": 80,
            **more,
        }
    )


def keeps_up(rank: int = 3, round_: int = 1) -> KeepsUp:
    return KeepsUp(round=round_, rank=rank, reason="0.1 % above the median")


def shift(step: int = 100, round_: int = 1) -> StepsShifted:
    return StepsShifted(
        round=round_, before_s=0.2, now_s=0.3, step=step, reason="50 % longer", section=None
    )


def cost(first: int, last: int, lost_s: float, rank: int = 3, round_: int = 1) -> Cost:
    return Cost(
        round=round_, rank=rank, is_design=False, first_step=first, last_step=last, lost_s=lost_s
    )


def without_costs(changes: Iterable[Change]) -> list[Change]:
    """The changes that are reported once: which rank is slow, and which keeps up."""
    return [one for one in changes if not isinstance(one, Cost)]
