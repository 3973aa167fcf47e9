"""The results of steps on the page of a job: loss and gradient norm, their bands, and marks."""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from statistics import median
from typing import Any

from everstep_services.history.dashboard.drawings import MARKS_MOST, WIDTH
from everstep_services.history.dashboard.formats import moment

HEIGHT = 120.0
_LANE = 11.0
_SHOWN = (("loss", "Loss"), ("grad_norm", "Gradient norm"))
LANES = ("again", "rollback", "skip", "exclude", "stop", "move")
"""Actions that have a mark, each at a height of its own."""


@dataclass(frozen=True, slots=True)
class ResultCurve:
    """One result over time, with the band in which it was expected."""

    title: str
    lines: Sequence[str]
    """The points of each part; between two parts there was no number."""
    band: str
    """The outline of the band; empty where none is reported."""
    last: float | None
    """None if the last one is not a number."""
    low: float
    high: float
    top: float
    """The height of the picture: what is higher is cut off, or it would flatten the rest."""


@dataclass(frozen=True, slots=True)
class NumericsMark:
    """A moment: an unexpected result, or what followed."""

    kind: str
    """`suspected`, `skipped`, or one of `LANES`."""
    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True)
class DrawnResults:
    """The results of a job over time; without curves while too few are reported."""

    began: datetime
    ended: datetime
    curves: Sequence[ResultCurve]
    marks: Sequence[NumericsMark]

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of marks that are drawn, in the order of the legend."""
        kinds = ("suspected", "skipped", *LANES)
        return [kind for kind in kinds if any(m.kind == kind for m in self.marks)]


def drawn_names(progress: Sequence[Mapping[str, Any]], cases: Sequence[object]) -> frozenset[str]:
    """The reported values that `results` draws: without a band or a case, none."""
    reported = {value["name"] for report in progress for value in report.get("values") or ()}
    names = {name for name, _ in _SHOWN}
    bands = {f"{name}_{end}" for name in names for end in ("low", "high")}
    return frozenset(names | bands) if cases or bands & reported else frozenset()


def results(
    progress: Sequence[Mapping[str, Any]], cases: Sequence[Mapping[str, Any]]
) -> DrawnResults | None:
    """Loss and gradient norm over time; None where there is nothing to draw."""
    names = drawn_names(progress, cases)
    values: dict[str, list[tuple[datetime, float]]] = {}
    for report in progress:
        at = moment(report.get("at"))
        for value in report.get("values") or ():
            if at is not None and value["name"] in names:
                values.setdefault(value["name"], []).append((at, float(value["value"])))
    times = [at for at in (moment(report.get("at")) for report in progress) if at is not None]
    began, ended = min(times, default=None), max(times, default=None)
    if not names or began is None or ended is None or began == ended:
        return None
    scale = WIDTH / (ended - began).total_seconds()

    def place(at: datetime) -> float:
        return round(min(WIDTH, max(0.0, (at - began).total_seconds() * scale)), 1)

    placed = {name: [(place(at), value) for at, value in sorted(rows)]
              for name, rows in values.items()}  # fmt: skip
    gaps = {name: [place(at) for at in _without(name, progress)] for name, _ in _SHOWN}
    curves = [
        _curve(name, title, placed, gaps[name])
        for name, title in _SHOWN
        if len(placed.get(name, ())) > 1
    ]
    skipped = [
        _span(place(since), place(until), text)
        for case in cases[:MARKS_MOST]
        for since, until, text in _skips(case, progress)
        if until >= began
    ]
    marks = [
        _mark(kind, place(at), text)
        for case in cases[:MARKS_MOST]
        for kind, at, text in _moments(case)
        if at >= began  # older reports are not read
    ]
    return DrawnResults(began, ended, curves, [*skipped, *marks]) if curves else None


def _without(name: str, progress: Sequence[Mapping[str, Any]]) -> Iterator[datetime]:
    """When a result was not a number: a report has no such value, and an earlier one of its round.

    Of what a script has reported once, each later report has the newest value.
    """
    times = [(moment(report.get("at")), report) for report in progress]
    rounds = set()
    for at, report in sorted(((at, report) for at, report in times if at), key=itemgetter(0)):
        if any(value["name"] == name for value in report.get("values") or ()):
            rounds.add(report.get("round"))
        elif report.get("round") in rounds:
            yield at


def _curve(
    name: str,
    title: str,
    placed: Mapping[str, Sequence[tuple[float, float]]],
    gaps: Sequence[float],
) -> ResultCurve:
    rows = placed[name]
    lower, upper = placed.get(f"{name}_low", ()), placed.get(f"{name}_high", ())
    numbers = [value for _, value in (*rows, *lower, *upper)]
    low, high = min(numbers), max(numbers)
    middle = median(value for _, value in rows)
    top = min(high, 3 * middle) if low >= 0 < middle else high

    def points(of: Sequence[tuple[float, float]]) -> str:
        span = (top - low) or 1.0
        return " ".join(
            f"{x},{HEIGHT - min((value - low) / span, 1.0) * HEIGHT:.1f}" for x, value in of
        )

    band = f"{points(lower)} {points(upper[::-1])}" if min(len(lower), len(upper)) > 1 else ""
    parts: dict[int, list[tuple[float, float]]] = {}
    for x, value in rows:
        parts.setdefault(bisect(gaps, x), []).append((x, value))
    last = None if gaps and gaps[-1] >= rows[-1][0] else rows[-1][1]
    return ResultCurve(title, [*map(points, parts.values())], band, last, low, high, top)


def _mark(kind: str, x: float, text: str) -> NumericsMark:
    """An unexpected result has the whole height, and each action its own height."""
    if kind == "suspected":
        return NumericsMark(kind, max(0.0, x - 1.5), 0.0, 3.0, HEIGHT, text)
    x = min(WIDTH - _LANE, max(0.0, x - _LANE / 2))
    return NumericsMark(kind, x, LANES.index(kind) * _LANE, _LANE, _LANE - 2, text)


def _span(from_x: float, to_x: float, text: str) -> NumericsMark:
    """Skipped data, from the first step that used them to the last."""
    width = max(9.0, to_x - from_x)
    return NumericsMark("skipped", max(0.0, to_x - width), 0.0, width, HEIGHT, text)


def _skips(
    case: Mapping[str, Any], progress: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[datetime, datetime, str]]:
    """When the steps were made whose data are passed over."""
    first, last = (case["suspected"] or {}).get("moved_at", case["step"]), case["step"]
    for act in case["acts"]:
        at = moment(act["at"]) if (act["action"], act["outcome"]) == ("skip", "done") else None
        if at is not None:
            began = min(_made_at(first, progress, at), at)
            yield began, at, f"steps {first} to {last}, whose data are passed over"


def _made_at(step: int, progress: Sequence[Mapping[str, Any]], before: datetime) -> datetime:
    """When a step was made the last time before then, between the reports of steps."""
    reports = [(report.get("step"), moment(report.get("at"))) for report in progress]
    made = sorted((at, number) for number, at in reports if number is not None and at is not None)
    earlier = [(at, number) for at, number in made if at <= before and number < step]
    if not earlier:
        return before
    since, from_step = earlier[-1]
    later = [(at, number) for at, number in made if since < at <= before and number >= step]
    until, to_step = later[0] if later else (before, step)
    share: float = (step - from_step) / (to_step - from_step)
    return since + (until - since) * share


def _moments(case: Mapping[str, Any]) -> Iterator[tuple[str, datetime, str]]:
    """When a case was suspected, and when each action followed."""
    suspected, story = case["suspected"], case["story"]
    sign = story[0] if story else f"step {case['step']}"
    at = moment((suspected or case["judged"] or {}).get("at"))
    if at is not None:
        yield "suspected", at, sign
    acts = [act for act in case["acts"] if act["outcome"] == "done" and act["action"] in LANES]
    for act in acts:
        at = moment(act["at"])
        if at is not None:
            yield act["action"], at, act["story"]
