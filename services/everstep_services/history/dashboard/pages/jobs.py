"""`/jobs`: a list with filters, and one job with the picture of its rounds and its pace."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from starlette.requests import Request

from everstep.incident_causes import OF_NO_PERSON
from everstep.job_states import JOB_STATES, OVER, WITH_RANKS
from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.drawings import WIDTH
from everstep_services.history.dashboard.formats import moment
from everstep_services.history.dashboard.pages import numerics
from everstep_services.history.dashboard.pages.page import Page, filters
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.rest import Reader, path_of, together

HEIGHT, _SMALL = 120.0, 40.0
_VALUES_MOST = 12
_PACE_OVER = timedelta(hours=1)
_SILENT_AFTER = timedelta(minutes=10)
"""Without a report for this time, the end of the job cannot be estimated."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The steps between two reports."""

    at: datetime
    step: int
    each_s: float
    """The median step."""
    p99_s: float | None
    max_s: float | None
    steps: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times, as lines of the median and of the 99th percentile."""

    points: str
    points_p99: str
    began: datetime
    ended: datetime
    median_s: float
    p99_s: float | None
    """That 99 of 100 steps did not exceed, in the worst minute."""
    max_s: float
    last_s: float
    top_s: float
    rows: Sequence[StepReport]
    """The newest first."""


@dataclass(frozen=True, slots=True)
class ValueCurve:
    """A metric that the script reports, as a small line."""

    name: str
    last: float
    low: float
    high: float
    points: str
    rows: Sequence[tuple[datetime, int, float]]
    """The newest first."""


@dataclass(frozen=True, slots=True)
class Eta:
    """When the last step would be made at the recent pace."""

    at: datetime
    steps_left: int
    each_s: float


def step_times(progress: Sequence[Mapping[str, Any]]) -> StepTimes | None:
    """The seconds of a step over time; None while fewer than two are known."""
    rows = sorted(filter(None, map(_row, progress)), key=lambda row: (row.at, row.step))
    if len(rows) < 2:
        return None
    p99s = [row.p99_s for row in rows if row.p99_s is not None]
    longest = max(row.max_s or row.each_s for row in rows)
    # One step that waited for minutes would press the line of all others to the ground.
    top = min(longest, max(3 * _median(rows), *(row.each_s for row in rows), *p99s)) * 1.1
    return StepTimes(
        points=_points([(row.at, row.each_s) for row in rows], top, HEIGHT),
        points_p99=_points([(r.at, r.p99_s) for r in rows if r.p99_s is not None], top, HEIGHT,
                           rows[0].at, rows[-1].at) if len(p99s) > 1 else "",
        began=rows[0].at, ended=rows[-1].at, median_s=_median(rows),
        p99_s=max(p99s, default=None), max_s=longest, last_s=rows[-1].each_s, top_s=top,
        rows=rows[::-1],
    )  # fmt: skip


def reported_values(
    progress: Sequence[Mapping[str, Any]], without: Collection[str] = ()
) -> Sequence[ValueCurve]:
    """The metrics that the script reports, `loss` first, then by name."""
    values: dict[str, list[tuple[datetime, int, float]]] = {}
    for report in progress:
        at = moment(report.get("at"))
        for reported in report.get("values") or ():
            name, value = reported["name"], reported["value"]
            if at is not None and name not in without:
                values.setdefault(name, []).append((at, int(report["step"]), float(value)))
    names = sorted(values, key=lambda name: (name != "loss", "loss" not in name, name))
    return [_value(name, sorted(values[name])) for name in names[:_VALUES_MOST]]


def eta(job: Mapping[str, Any], times: StepTimes | None, now: datetime) -> Eta | None:
    """None unless the job runs, its script named a last step, and steps were reported lately."""
    total, step = job.get("total_steps"), job.get("last_step")
    if job["state"] != "running" or not total or step is None or step >= total or times is None:
        return None
    if now - times.ended > _SILENT_AFTER:
        return None
    recent = [row for row in times.rows if times.ended - row.at <= _PACE_OVER]
    steps = sum(row.steps for row in recent)
    each_s = sum(row.each_s * row.steps for row in recent) / steps if steps else times.last_s
    left = total - step
    try:
        return Eta(now + timedelta(seconds=left * each_s), left, each_s)
    except OverflowError:
        return None


def lost_to_people(rounds: Sequence[Mapping[str, Any]]) -> tuple[int, Sequence[int]]:
    """The steps that were made again because people ended rounds, and those rounds."""
    lost, ended = 0, []
    last: Mapping[str, Any] | None = None  # the last one that has made steps
    for row in sorted(rounds, key=lambda row: row["round"]):
        if last and row["lost_steps"] and last["end_cause"] == "operator":
            lost += row["lost_steps"]
            ended.append(last["round"])
        last = last if row["last_step"] is None else row
    return lost, ended


def _row(report: Mapping[str, Any]) -> StepReport | None:
    at, each_s = moment(report.get("at")), _step_s(report)
    if at is None or each_s is None:
        return None
    return StepReport(
        at, int(report["step"]), each_s, report.get("step_p99_s") or None,
        report.get("step_max_s") or None,
        int(report.get("steps") or 1),
    )  # fmt: skip


def _step_s(report: Mapping[str, Any]) -> float | None:
    if report.get("step_p50_s"):
        return float(report["step_p50_s"])
    if report.get("is_first"):
        return None  # its time is that of the start
    steps, took_s = report.get("steps") or 0, report.get("steps_s") or 0.0
    return float(took_s) / steps if steps and took_s else None


def _median(rows: Sequence[StepReport]) -> float:
    """The median of the reports' medians, each counted by its steps."""
    ordered = sorted(rows, key=lambda row: row.each_s)
    half, seen = sum(row.steps for row in rows) / 2, 0
    for row in ordered:
        seen += row.steps
        if seen >= half:
            return row.each_s
    return ordered[-1].each_s


def _value(name: str, rows: Sequence[tuple[datetime, int, float]]) -> ValueCurve:
    numbers = [value for _, _, value in rows]
    low, high = min(numbers), max(numbers)
    span = (high - low) or 1.0
    points = _points([(at, value - low) for at, _, value in rows], span, _SMALL)
    return ValueCurve(name, numbers[-1], low, high, points, rows[::-1])


def _points(
    values: Sequence[tuple[datetime, float]],
    top: float,
    height: float,
    began: datetime | None = None,
    ended: datetime | None = None,
) -> str:
    first, last = began or values[0][0], ended or values[-1][0]
    span_s = max((last - first).total_seconds(), 1e-3)
    return " ".join(
        f"{(at - first).total_seconds() / span_s * WIDTH:.1f},"
        f"{height - min(value / top, 1.0) * height:.1f}"
        for at, value in values
    )


_ROUNDS = 200
_POINTS = 500
_PARTS = 600
_FINDINGS = 50
_ACTS_SHOWN = 10
_MARKS = drawings.MARKS_MOST  # a commit of many ranks is a large fact


async def listed(reader: Reader, request: Request) -> Page:
    """Jobs, with filters in the URL."""
    given = filters(request, "state", "user", "label", "q", "sort", "cursor")
    jobs = await reader.get("jobs", limit=50, **given)
    return Page(
        "jobs.html",
        {
            "title": "Jobs",
            "live": "",
            "jobs": jobs,
            "states": JOB_STATES,
            "is_filtered": any(name in given for name in ("state", "user", "label", "q")),
        },
    )


async def one(reader: Reader, request: Request) -> Page:
    """A job: where its time went, how fast it steps, what went wrong."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    facts = {"job": job, "order": "desc", "limit": _POINTS}
    (
        detail,
        goodput,
        parts,
        rounds,
        incidents,
        decisions,
        saves,
        commits,
        progress,
        slow,
        found,
        acts,
        cases,
        determinism,
    ) = await together(
        reader.get(path),
        reader.get_or_not(f"{path}/goodput"),
        reader.get_or_not(f"{path}/timeline", most=_PARTS),
        reader.get_or_not(f"{path}/rounds", limit=_ROUNDS),
        reader.get_or_not(f"{path}/incidents", limit=20),
        reader.get_or_not(f"{path}/actions", limit=20),
        reader.get_or_not(f"{path}/saves"),
        reader.get_or_not("facts", kind="checkpoint_committed", **{**facts, "limit": _MARKS}),
        reader.get_or_not("facts", kind="progress_made", **facts),
        reader.get_or_not(f"{path}/stragglers", state="open", limit=5),
        reader.get_or_not(f"{path}/stragglers", limit=_FINDINGS),
        reader.get_or_not("facts", kind="operator_acted", **{**facts, "limit": _MARKS}),
        reader.get_or_not(f"{path}/numerics", limit=_MARKS),
        reader.get_or_not(f"{path}/numerics/determinism", limit=_MARKS),
    )
    told = rounds.items
    saved = [fact["body"] for fact in commits.items]
    reports = [fact["body"] for fact in progress.items]
    steps = attempt(lambda: step_times(reports))
    return Page(
        "job.html",
        {
            "title": job,
            "live": f"job={job}",
            "job": detail,
            "rounds": rounds,
            "told": told,
            "timeline": attempt(
                lambda: drawings.timeline(parts.items, incidents.items, saved, found.items)
            ),
            "parts_read": parts,
            "goodput": goodput,
            "shares": attempt(
                lambda: drawings.shares(goodput.data["seconds"] if goodput.data else None)
            ),
            "steps": steps,
            "results": attempt(lambda: numerics.results(reports, cases.items)),
            "cases": cases.items,
            "determinism": determinism.items,
            "values": attempt(
                lambda: reported_values(reports, numerics.drawn_names(reports, cases.items))
            ),
            "eta": attempt(lambda: eta(detail, steps, reader.rest.now())),
            "incidents": incidents,
            "acts": [act for act in acts.items if act["body"].get("origin") not in OF_NO_PERSON][
                :_ACTS_SHOWN
            ],
            "lost_to_people": attempt(lambda: lost_to_people(told)),
            "decisions": decisions,
            "saves": saves,
            "slow": slow.items,
            "waits": told[0]["waiting_reason"] if told and detail["state"] == "forming" else "",
            "has_ranks": detail["state"] in WITH_RANKS,
            "is_over": moment(detail["ended_at"]) is not None and detail["state"] in OVER,
        },
    )
