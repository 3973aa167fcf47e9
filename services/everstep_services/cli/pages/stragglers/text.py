"""Slow ranks as text: the verdict first, then the tables that it rests on."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from everstep_services.cli.cells import aligned, cell, counted, listed, span
from everstep_services.straggler.domain.report import Design, Finding, RankRow, TraceReport

_CAUSES = {
    "input": "its input takes",
    "compute": "its computations take",
    "host": "its host takes",
    "network": "its transfers take",
    "device": "its device takes",
    "unknown": "it takes, between transfers,",
}
_MOST_STEPS = 5
_MOST_PARTS = 10
_RANKS_SHOWN = 8


def record(report: TraceReport, notes: Sequence[str]) -> dict[str, Any]:
    """Everything, for programs."""
    answer: dict[str, Any] = msgspec.to_builtins(report)
    answer["notes"] = [*notes, *report.notes]
    return answer


def lines(report: TraceReport, top: int, notes: Sequence[str]) -> Iterator[str]:
    """The report for people, with the `top` best and worst ranks."""
    yield from verdict(report)
    yield ""
    yield from _summary(report)
    yield from _ranks(report, top)
    yield from _parts(report)
    yield from _steps(report)
    for note in (*notes, *report.notes):
        yield f"note: {cell(note)}"


def verdict(report: TraceReport) -> Iterator[str]:
    """Who is slow, why, and what it costs; a line each, with its reason below."""
    for finding in report.findings:
        yield headline(finding)
        yield f"  {cell(finding.reason)}"
    for design in report.designs:
        yield design_line(design)
        yield f"  {cell(design.reason)}"
    if not report.findings:
        yield nobody(report)


def nobody(report: TraceReport) -> str:
    """One line where there is no finding: no rank is slow, or none could be judged."""
    if report.unjudged:
        return f"no rank could be judged: {cell(report.unjudged)}"
    return f"no rank is slow: {counted(report.ranks, 'rank')} compared within {roles(report)}"


def headline(finding: Finding) -> str:
    """One line: who, cause, price."""
    until = f" until step {finding.last_step}" if finding.cleared else ""
    price = (
        "its price is not known"
        if finding.price_ratio is None
        else f"without it the job would be {percent(finding.price_ratio)} faster"
    )
    return (
        f"{who(finding)} {'was' if finding.cleared else 'is'} slow ({finding.cause}): "
        f"{_CAUSES.get(finding.cause, 'it takes')} {percent(finding.slower_ratio)} longer than "
        f"usual in {cell(finding.role)!r}, from step {finding.first_step} on{until}; {price}"
    )


def who(finding: Finding) -> str:
    """`rank 3 (node-01)`, `ranks 0, 1, 2, 3, of one process group,`."""
    hosts = f" ({', '.join(cell(host) for host in finding.hosts[:4])})" if finding.hosts else ""
    if len(finding.ranks) == 1:
        return f"rank {finding.ranks[0]}{hosts}"
    return f"the group of ranks {listed(finding.ranks, _RANKS_SHOWN)}{hosts}"


def design_line(design: Design) -> str:
    price = "" if design.price_ratio is None else (
        f"; evenly the job would be {percent(design.price_ratio)} faster"
    )  # fmt: skip
    of = (
        f" ({cell(design.role)}, ranks {listed(design.ranks, _RANKS_SHOWN)})" if design.role else ""
    )
    return f"by design, {design.what}{of}: no rank is at fault{price}"


def percent(ratio: float) -> str:
    return f"{max(ratio, 0.0) * 100:.1f} %"


def roles(report: TraceReport) -> str:
    """`'stage 0' (4), 'stage 1' (4)`."""
    shown = [f"{cell(name)!r} ({count})" for name, count in list(report.roles.items())[:8]]
    more = len(report.roles) - len(shown)
    return ", ".join(shown) + (f" and {counted(more, 'more role')}" if more > 0 else "")


def summary(report: TraceReport) -> list[tuple[str, str]]:
    """The training, and where its time goes."""
    schedule = f", {report.schedule}" if report.schedule else ""
    rows = [
        ("training", f"{counted(report.ranks, 'rank')}{schedule}, "
                     f"{counted(report.steps, 'step')} of {span_fine(report.step_s)}, "
                     f"{counted(report.rows, 'operation')}"),
        ("roles", roles(report)),
    ]  # fmt: skip
    if report.slowdown_ratio is not None:
        error = percent(report.replay_error_ratio or 0)
        text = f"{report.slowdown_ratio:.3f} times as long as with all ranks alike"
        rows.append(("slow-down", f"{text} (replay error {error})"))
    if report.shares:
        shares = ", ".join(f"{share.cause} {percent(share.ratio)}" for share in report.shares)
        rows.append(("would save", shares))
    return rows


def _summary(report: TraceReport) -> Iterator[str]:
    yield from aligned(summary(report), indent=0)


RANK_HEAD = ("RANK", "HOST", "ROLE", "OWN TIME", "SLOWER", "LATE", "NVRX REL", "NVRX IND", "PRICE")


def worst(report: TraceReport) -> list[RankRow]:
    """Ranks, the slowest within its role first."""
    return sorted(
        report.rank_rows,
        key=lambda row: -(row.slower_ratio if row.slower_ratio is not None else -1),
    )


def rank_cells(row: RankRow) -> tuple[str, ...]:
    return (
        str(row.rank),
        row.host or "-",
        row.role,
        span_fine(row.own_s),
        "-" if row.slower_ratio is None else f"{row.slower_ratio * 100:+.1f} %",
        span_fine(row.late_s),
        _score(row.relative_score),
        _score(row.individual_score),
        "-" if row.price_ratio is None else percent(row.price_ratio),
    )


def span_fine(seconds: float | None) -> str:
    """As `span`, with tenths of a millisecond where it is short."""
    if seconds is not None and seconds < 0.01:
        return f"{seconds * 1000:.2f} ms"
    return span(seconds)


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _ranks(report: TraceReport, top: int) -> Iterator[str]:
    ranked = worst(report)
    titles = [("worst ranks", ranked[:top])]
    if len(ranked) > top:
        titles.append(("best ranks", ranked[max(top, len(ranked) - top) :][::-1]))
    for title, rows in titles:
        yield from _table(title, RANK_HEAD, [rank_cells(row) for row in rows])


PART_HEAD = ("NAME", "KIND", "OWN TIME A STEP", "EVEN, THE JOB IS FASTER BY")


def _parts(report: TraceReport) -> Iterator[str]:
    for title, parts in (("operations", report.operations), ("roles", report.role_rows)):
        if len(parts) > 1:
            rows = [
                (row.name[:60], row.kind or "role", span_fine(row.own_s),
                 "-" if row.price_ratio is None else percent(row.price_ratio))
                for row in parts[:_MOST_PARTS]
            ]  # fmt: skip
            yield from _table(title, PART_HEAD, rows)


STEP_HEAD = ("STEP", "TOOK", "SLOW-DOWN", "REPLAY ERROR")


def _steps(report: TraceReport) -> Iterator[str]:
    slowest = sorted(report.step_rows, key=lambda row: -row.duration_s)[:_MOST_STEPS]
    rows = [
        (str(row.step), span_fine(row.duration_s),
         "-" if row.slowdown_ratio is None else f"{row.slowdown_ratio:.3f}",
         "-" if row.error_ratio is None else percent(row.error_ratio))
        for row in slowest
    ]  # fmt: skip
    yield from _table("slowest steps", STEP_HEAD, rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"{title}:"
    yield from aligned([head, *rows])
    if title == "slowest steps":
        yield ""
