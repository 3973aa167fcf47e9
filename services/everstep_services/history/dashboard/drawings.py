"""The geometry of pictures that the server draws: rounds over time, a ledger.

Pictures are SVG 1000 units wide that stretches with the page; what they say in words stands in
HTML around them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from everstep_services.history.dashboard.formats import moment
from everstep_services.history.dashboard.rest import path_of

WIDTH = 1000.0
_LEAST = 1.5
"""A segment is never narrower, or nobody sees it."""
MARKS_MOST = 100
CLASSES: Mapping[str, str] = {
    "productive": "Productive",
    "start_up": "Start-up",
    "rendezvous": "Rendezvous",
    "restore": "Restore",
    "heal": "Heal",
    "checkpoint_stall": "Checkpoint",
    "stall": "Stall",
    "lost_steps": "Lost steps",
    "straggler_tax": "Slow ranks",
    "idle": "Idle",
    "unknown": "Unknown",
}
"""What goodput calls the classes of time, and what people read. Each has one colour."""
PHASES = (
    ("unfinished_s", "Unfinished step", "lost_steps"),
    ("detect_s", "Detect", "stall"), ("evidence_s", "Evidence", "idle"),
    ("decide_s", "Decide", "idle"), ("stop_s", "Stop", "rendezvous"),
    ("rendezvous_s", "Rendezvous", "rendezvous"), ("start_s", "Start", "start_up"),
    ("restore_s", "Restore", "restore"), ("heal_s", "Heal", "heal"),
    ("first_step_s", "First step", "start_up"), ("no_step_s", "No step", "start_up"),
    ("other_s", "Other", "unknown"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time of one class."""

    kind: str
    text: str
    seconds: float
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """A moment, an incident or a checkpoint; or for how long a rank was slow."""

    kind: str
    x: float
    text: str
    href: str = ""
    width: float = 0.0


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """A job over its time."""

    began: datetime
    ended: datetime
    segments: Sequence[Segment]
    marks: Sequence[TimelineMark]

    @property
    def seconds(self) -> float:
        """All of it."""
        return (self.ended - self.began).total_seconds()


def timeline(
    parts: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
    commits: Sequence[Mapping[str, Any]],
    slow: Sequence[Mapping[str, Any]] = (),
) -> DrawnTimeline | None:
    """What the time of a job went into, part by part; None while no time has passed."""
    times = [(moment(part["since"]), moment(part["until"]), part) for part in parts]
    timed = [(since, until, part) for since, until, part in times if since and until]
    if not timed:
        return None
    began, ended = timed[0][0], timed[-1][1]
    scale = WIDTH / max((ended - began).total_seconds(), 1e-3)

    def place(at: datetime) -> float:
        return min(WIDTH, max(0.0, (at - began).total_seconds() * scale))

    segments = []
    for since, until, part in timed:
        x, width = place(since), max(_LEAST, place(until) - place(since))
        name = CLASSES.get(part["time_class"], "Mixed")
        text = name if part["round"] is None else f"{name}, round {part['round']}"
        seconds = (until - since).total_seconds()
        segments.append(
            Segment(part["time_class"], text, seconds, round(min(x, WIDTH - width), 2),
                    round(width, 2))
        )  # fmt: skip
    # Short ones are drawn last, or the long one behind them would cover them.
    segments.sort(key=lambda segment: -segment.width)
    marks = [*_slow_ranks(slow, ended, place), *_marks(incidents, commits, place)]
    return DrawnTimeline(began, ended, segments, marks)


def _marks(
    incidents: Sequence[Mapping[str, Any]],
    commits: Sequence[Mapping[str, Any]],
    place: Callable[[datetime], float],
) -> Sequence[TimelineMark]:
    marks = []
    for commit in commits[:MARKS_MOST]:
        at = moment(commit.get("at"))
        if at is not None and commit.get("tier") == "global":
            marks.append(
                TimelineMark("checkpoint", round(place(at), 2), f"step {commit['step']} saved")
            )
    for incident in incidents:
        at = moment(incident["opened_at"])
        if at is not None:
            text = incident["headline"] or "incident"
            href = f"/{path_of('incidents', incident['incident'])}"
            marks.append(TimelineMark("incident", round(place(at), 2), text, href))
    return marks


def _slow_ranks(
    findings: Sequence[Mapping[str, Any]], ended: datetime, place: Callable[[datetime], float]
) -> Iterator[TimelineMark]:
    """When each slow rank was found, until it no longer was; a finding is over with its round."""
    for finding in findings:
        since = moment(finding["found_at"])
        if since is not None:
            x = place(since)
            width = max(_LEAST, place(moment(finding["cleared_at"]) or ended) - x)
            text = f"slow: rank {finding['rank']} on {finding['node']}"
            href = f"/{path_of('jobs', finding['job'], 'stragglers')}"
            yield TimelineMark("slow", round(min(x, WIDTH - width), 2), text, href, round(width, 2))


def shares(seconds: Mapping[str, float] | None) -> Sequence[tuple[str, str, float, float, float]]:
    """Classes of time by how long they lasted: class, name, seconds, place and width in a bar."""
    if not seconds:
        return ()
    whole_s = sum(seconds.values()) or 1.0
    shown, x = [], 0.0
    for kind, name in CLASSES.items():
        lasted_s = seconds.get(kind, 0.0)
        if lasted_s > 0:
            width = lasted_s / whole_s * WIDTH
            shown.append((kind, name, lasted_s, round(x, 2), round(width, 2)))
            x += width
    return shown


@dataclass(frozen=True, slots=True)
class Phase:
    """One row of a waterfall."""

    name: str
    kind: str
    seconds: float
    x: float
    width: float


def ledger(parts: Mapping[str, float] | None) -> Sequence[Phase]:
    """Where the time of an incident went, one phase after the other."""
    if parts is None:
        return ()
    whole_s = sum(parts[name] for name, _, _ in PHASES) or 1.0
    phases, at = [], 0.0
    for name, text, kind in PHASES:
        seconds = parts[name]
        if seconds > 0:
            x, width = at / whole_s * WIDTH, max(_LEAST, seconds / whole_s * WIDTH)
            place = round(min(x, WIDTH - width), 2)
            phases.append(Phase(text, kind, seconds, place, round(width, 2)))
        at += seconds
    return phases
