"""The best and worst ranks of a job, in the form of NVRx's report. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

from everstep.messages import RankScores, RankScoreTable, Score

ScoreKind = Literal["relative", "individual"]
_SCORE_KINDS: tuple[ScoreKind, ...] = ("relative", "individual")
_SIGNALS = ("gpu", "own", "section:")
"""The signal that is reported: the first that any rank has. Of sections each rank's worst."""


def report_lines(table: RankScoreTable, most: int) -> Iterator[str]:
    """One line for relative and one for individual scores; none where nothing was compared."""
    for kind in _SCORE_KINDS:
        for signal in _SIGNALS:
            scored = sorted(_scored(table.ranks, signal, kind), key=lambda pair: pair[0])
            if not scored:
                continue
            worst, best = scored[:most], scored[::-1][:most]
            of = f"signal={signal.rstrip(':')} score={kind} ranks={len(scored)}"
            yield (f"window={table.window} {of} worst={_told(worst)!r} best={_told(best)!r}")
            break


def _scored(
    ranks: Sequence[RankScores], signal: str, kind: ScoreKind
) -> Iterator[tuple[float, RankScores]]:
    for rank in ranks:
        values = [_value(score, kind) for score in rank.scores if score.signal.startswith(signal)]
        finite = [value for value in values if value is not None]
        if finite:
            yield min(finite), rank


def _value(score: Score, kind: ScoreKind) -> float | None:
    return score.relative_score if kind == "relative" else score.individual_score


def _told(scored: Sequence[tuple[float, RankScores]]) -> str:
    return ", ".join(f"rank {row.rank} on {row.node} {value:.2f}" for value, row in scored)
