"""The report of the best and worst ranks, as it stands in the log."""

from everstep.messages import RankScores, RankScoreTable, Score
from everstep_services.straggler.rank_report import report_lines


def table(*scores: tuple[Score, ...]) -> RankScoreTable:
    ranks = tuple(
        RankScores(rank=rank, node=f"n{rank // 2}", scores=one) for rank, one in enumerate(scores)
    )
    return RankScoreTable(round=1, window=640, ranks=ranks)


def own(relative: float | None, individual: float | None = None) -> tuple[Score, ...]:
    return (Score(signal="own", relative_score=relative, individual_score=individual),)


def test_the_worst_and_the_best_are_told_by_both_scores() -> None:
    lines = list(report_lines(table(own(0.98, 1.0), own(0.5, 0.9), own(1.0, 0.4)), 2))
    assert lines == [
        "window=640 signal=own score=relative ranks=3 "
        "worst='rank 1 on n0 0.50, rank 0 on n0 0.98' best='rank 2 on n1 1.00, rank 0 on n0 0.98'",
        "window=640 signal=own score=individual ranks=3 "
        "worst='rank 2 on n1 0.40, rank 1 on n0 0.90' best='rank 0 on n0 1.00, rank 1 on n0 0.90'",
    ]


def test_kernels_go_before_what_the_host_saw() -> None:
    gpu = (*own(0.9), Score(signal="gpu", relative_score=0.6))
    (line,) = report_lines(table(gpu), 5)
    assert line == (
        "window=640 signal=gpu score=relative ranks=1 "
        "worst='rank 0 on n0 0.60' best='rank 0 on n0 0.60'"
    )


def test_of_sections_each_ranks_worst_is_told() -> None:
    sections = tuple(
        Score(signal=f"section:{name}", individual_score=score)
        for name, score in (("step", 0.9), ("data", 0.3), ("forward", None))
    )
    (line,) = report_lines(table(sections), 5)
    assert line == (
        "window=640 signal=section score=individual ranks=1 "
        "worst='rank 0 on n0 0.30' best='rank 0 on n0 0.30'"
    )


def test_what_was_not_compared_is_not_reported() -> None:
    assert list(report_lines(table(own(None), ()), 5)) == []
