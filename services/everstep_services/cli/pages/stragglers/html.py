"""Slow ranks as one HTML file that needs nothing else: no script or font of another site."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import msgspec

from everstep_services.cli.pages.stragglers import text
from everstep_services.straggler.domain.report import HeatMap, TraceReport

_MOST_LINES = 512
_MOST_RANKS = 1000
_TABLE_COLUMNS = 16


def page(report: TraceReport, title: str, notes: Sequence[str]) -> str:
    """The page. Whatever comes from a trace is escaped."""
    template = (
        files("everstep_services.cli.pages.stragglers").joinpath("page.html").read_text("utf-8")
    )
    heat = _binned(report.heat_map)
    parts = {
        "TITLE": escape(title),
        "VERDICT": _verdict(report),
        "SUMMARY": _table((), text.summary(report)),
        "RANKS": _ranks(report),
        "OPERATIONS": _parts(report),
        "HEAT_TABLE": _heat_table(heat),
        "HEAT_NOTE": escape(heat.note),
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in (*notes, *report.notes)),
        "DATA": _data(heat),
    }
    for name, content in parts.items():
        template = template.replace(f"<!--{name}-->", content)
    return template


class _Heat(msgspec.Struct):
    """The data of the picture: a line is a rank, or the worst of several."""

    lines: list[str]
    steps: list[int]
    ratios: list[list[float | None]]
    note: str = ""


def _binned(heat: HeatMap) -> _Heat:
    width = -(-len(heat.ranks) // _MOST_LINES)
    lines, ratios = [], []
    for first in range(0, len(heat.ranks), width):
        ranks = heat.ranks[first : first + width]
        lines.append(str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}")
        columns = zip(*heat.ratios[first : first + width], strict=True)
        ratios.append([_worst(column) for column in columns])
    note = f"A line is the worst of {width} ranks." if width > 1 else ""
    return _Heat(lines, list(heat.steps), ratios, note)


def _worst(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(max(numbers), 4) if numbers else None


def _data(heat: _Heat) -> str:
    return msgspec.json.encode(heat).decode().replace("<", "\\u003c")


def _verdict(report: TraceReport) -> str:
    slow = [_card("slow", text.headline(finding), finding.reason) for finding in report.findings]
    design = [
        _card("design", text.design_line(finding), finding.reason) for finding in report.designs
    ]
    cards = slow + design
    if not report.findings:
        kind = "unjudged" if report.unjudged else "fine"
        cards.insert(0, _card(kind, text.nobody(report), ""))
    return "".join(cards)


def _card(kind: str, line: str, reason: str) -> str:
    below = f"<p>{escape(reason)}</p>" if reason else ""
    return f'<section class="card {kind}"><h2>{escape(line)}</h2>{below}</section>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], first: str = "th") -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for row in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in row[1:])
        body.append(f'<tr><{first} scope="row">{escape(row[0])}</{first}>{cells}</tr>')
    thead = f"<thead><tr>{top}</tr></thead>" if head else ""
    kind = "numbers" if head else "facts"
    return f'<table class="{kind}">{thead}<tbody>{"".join(body)}</tbody></table>'


def _sentence(head: Sequence[str]) -> list[str]:
    return [name.capitalize().replace("Nvrx", "NVRx") for name in head]


def _ranks(report: TraceReport) -> str:
    rows = [text.rank_cells(row) for row in text.worst(report)[:_MOST_RANKS]]
    return _table(_sentence(text.RANK_HEAD), rows)


def _parts(report: TraceReport) -> str:
    rows = [
        (row.name, row.kind or "role", text.span_fine(row.own_s),
         "-" if row.price_ratio is None else text.percent(row.price_ratio))
        for row in (*report.operations, *(report.role_rows if len(report.role_rows) > 1 else ()))
    ]  # fmt: skip
    return _table(_sentence(text.PART_HEAD), rows)


def _heat_table(heat: _Heat) -> str:
    """The picture in numbers, for those who cannot see it: the worst of some columns each."""
    width = max(1, -(-len(heat.steps) // _TABLE_COLUMNS))
    spans = range(0, len(heat.steps), width)
    head = ["Rank", *(f"from step {heat.steps[at]}" for at in spans)]
    rows = [
        [line, *(_shown(_worst(ratios[at : at + width])) for at in spans)]
        for line, ratios in zip(heat.lines, heat.ratios, strict=True)
    ]
    return _table(head, rows)


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
