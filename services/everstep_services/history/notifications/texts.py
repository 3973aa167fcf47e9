"""What a notice says, in words and in facts, the same for every target. Pure."""

from collections.abc import Callable, Iterable
from itertools import dropwhile
from typing import Literal
from urllib.parse import quote

from everstep.messages.documents.notices import Notice
from everstep.observe.printable import beginning, printable
from everstep.observe.redaction import redact
from everstep.subjects import CLUSTER

Severity = Literal["critical", "error", "warning", "info"]

TITLE_MOST = 200
TEXT_MOST = 2000
FACT_MOST = 300
_SHOWN_NAMES = 8
_SEVERITIES: dict[str, Severity] = {
    "incident": "error",
    "job_failed": "critical",
    "job_stopped": "error",
    "slow_rank": "warning",
    "node_drained": "info",
    "node_excluded": "warning",
    "breaker_open": "error",
    "test": "info",
}


def severity(notice: Notice) -> Severity:
    """How urgent it is."""
    return _SEVERITIES.get(notice.event, "warning")


def title(notice: Notice) -> str:
    """One line: what, where, and whether it is over."""
    return clean(_TITLES.get(notice.event, _other)(notice), TITLE_MOST)


def text(notice: Notice) -> str:
    """What happened, what the verdict says, what was done, how it ended, what it cost."""
    reports = [notice.reason, notice.verdict and f"Verdict: {notice.verdict}"]
    if _is_conclusive(notice):
        verdict = f"Verdict: {_cause(notice)}. {notice.verdict}"
        is_other = notice.reason not in notice.verdict
        reports = [verdict, f"First reported: {notice.reason}" if is_other else ""]
    reported = f"{notice.reason}; {notice.verdict}"
    clauses = notice.ending.split("; ")
    ending = "; ".join(dropwhile(lambda clause: clause in reported, clauses))
    sentences = [
        *reports,
        notice.action and f"Done: {notice.action}",
        ending and f"End: {ending}",
        _cost(notice),
        _more(notice),
    ]
    return "\n".join(clean(sentence, TEXT_MOST // 3) for sentence in sentences if sentence)[
        :TEXT_MOST
    ]


def facts(notice: Notice) -> dict[str, str]:
    """Names and values, without those that are not known."""
    lost = None if notice.lost_s is None else f"{notice.lost_s:.1f} s"
    named = {
        "job": "" if notice.job == CLUSTER else notice.job,
        "cause": _cause(notice),
        "ranks": _joined(notice.ranks),
        "nodes": _joined(notice.nodes),
        "affected ranks": str(notice.affected) if notice.affected else "",
        "outcome": notice.outcome,
        "lost time": lost or "",
        "lost steps": str(notice.lost_steps) if notice.lost_steps else "",
        "done": notice.action,
    }
    return {name: clean(value, FACT_MOST) for name, value in named.items() if value}


def link(notice: Notice, dashboard_url: str) -> str:
    """The page about it; empty where no dashboard is set."""
    base = dashboard_url.rstrip("/")
    if not base:
        return ""
    match notice.event:
        case "incident":
            return f"{base}/incidents/{_quoted(notice.subject)}"
        case "slow_rank":
            return f"{base}/jobs/{_quoted(notice.job)}/stragglers"
        case "job_failed" | "job_stopped":
            return f"{base}/jobs/{_quoted(notice.job)}"
        case "node_excluded" | "node_drained":
            return f"{base}/nodes/{_quoted(notice.subject)}"
        case _:
            return f"{base}/"


def clean(value: str, most: int) -> str:
    """One line of bounded length, without secrets and without what a terminal obeys."""
    told = printable(redact(" ".join(value.split())))
    return beginning(told, most)


def _incident(notice: Notice) -> str:
    where = _who(notice)
    cause = f" ({notice.cause})" if notice.cause not in {"", "unknown"} else ""
    if notice.outcome:
        return f"{notice.job}: incident {notice.outcome}{cause}{where}"
    return f"{notice.job}: incident{cause}{where}: {_headline(notice)}"


def _headline(notice: Notice) -> str:
    """The verdict, which may name others than the first report did; without one, that report."""
    return notice.verdict if _is_conclusive(notice) else notice.reason


def _is_conclusive(notice: Notice) -> bool:
    return bool(notice.verdict) and not notice.is_inconclusive


def _job_ended(notice: Notice) -> str:
    word = "failed" if notice.event == "job_failed" else "stopped"
    return f"{notice.job}: the job has {word}: {_headline(notice)}"


def _slow_rank(notice: Notice) -> str:
    if notice.outcome == "round_ended":
        return f"{notice.job}: the round of a slow rank has ended:{_who(notice)}"
    if notice.outcome:
        return f"{notice.job}: no longer slow:{_who(notice)}"
    costs = f", costs {notice.cost_ratio:.0%}" if notice.cost_ratio else ""
    return f"{notice.job}: slow ({notice.cause or 'unknown'}{costs}):{_who(notice)}"


def _excluded(notice: Notice) -> str:
    if notice.outcome:
        return f"node {notice.subject} may join again"
    return f"node {notice.subject} is excluded: {notice.reason}"


def _drained(notice: Notice) -> str:
    match notice.outcome:
        case "":
            return f"node {notice.subject} leaves {notice.job}: {notice.reason}"
        case "lost":
            return f"node {notice.subject} was lost before it left {notice.job}"
        case "job_over":
            return f"{notice.job} is over before node {notice.subject} left it"
        case _:
            return f"node {notice.subject} has left {notice.job}"


def _breaker(notice: Notice) -> str:
    if notice.outcome:
        return "health excludes nodes again"
    return f"health excludes no more nodes by itself: {notice.reason}"


def _other(notice: Notice) -> str:
    return notice.reason


_TITLES: dict[str, Callable[[Notice], str]] = {
    "incident": _incident,
    "job_failed": _job_ended,
    "job_stopped": _job_ended,
    "slow_rank": _slow_rank,
    "node_drained": _drained,
    "node_excluded": _excluded,
    "breaker_open": _breaker,
}


def _who(notice: Notice) -> str:
    ranks = f" rank {_joined(notice.ranks)}" if notice.ranks else ""
    nodes = f" on {_joined(notice.nodes)}" if notice.nodes else ""
    return f"{ranks}{nodes}"


def _cause(notice: Notice) -> str:
    if notice.confidence is None or notice.cause in {"", "unknown"}:
        return notice.cause
    return f"{notice.cause} ({notice.confidence:.0%})"


def _cost(notice: Notice) -> str:
    if notice.lost_s is None:
        return ""
    plural = "" if notice.lost_steps == 1 else "s"
    steps = f", {notice.lost_steps} step{plural} made again" if notice.lost_steps else ""
    return f"Cost: {notice.lost_s:.1f} s{steps}"


def _more(notice: Notice) -> str:
    if not notice.more:
        return ""
    span_s = max(0.0, notice.heard_s - (notice.more_since_s or notice.heard_s))
    if span_s < 60:
        return f"and {notice.more} more within a minute"
    minutes = round(span_s / 60)
    return f"and {notice.more} more in {minutes} minute{'s' if minutes > 1 else ''}"


def _joined(names: Iterable[object]) -> str:
    told = [str(name) for name in names]
    rest = f" and {len(told) - _SHOWN_NAMES} more" if len(told) > _SHOWN_NAMES else ""
    return f"{', '.join(told[:_SHOWN_NAMES])}{rest}"


def _quoted(name: str) -> str:
    return quote(name, safe="")
