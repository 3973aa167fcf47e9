"""A verdict in plain words: who caused it, how sure that is, why, and what is missing."""

from collections.abc import Iterator, Sequence

from everstep.verdict_causes import advice_text, retry_text
from everstep_services.cli.cells import (
    SHORT_ID,
    Record,
    aligned,
    cell,
    clean_lines,
    counted,
    listed,
    moment,
)

_SHOWN = 6
_PAGE = "docs/runbooks/cause-{}.md"
"""Says of a cause what it means, and what to do."""


def verdict_lines(incident: Record) -> Iterator[str]:
    """The verdict; where there is none, that there is none, and what would bring one."""
    verdict = incident["verdict"]
    if verdict is None:
        yield "verdict: none yet; attribution judges it within seconds, or once it runs again"
        return
    yield f"verdict: {cell(verdict['summary'])}"
    yield f"  {cell(verdict['verdict_reason'])}"
    yield from _culprits(verdict)
    if verdict["is_corrected"]:
        yield from _correction(incident)
    yield from _grounds(verdict)
    for other in (verdict["alternatives"] or ())[:_SHOWN]:
        sure = "" if other["cause"] == "unknown" else f" ({_percent(other['confidence'])})"
        yield f"  {_other(verdict)} {_cause(other)}{sure}: {cell(other['reason'])}"
    for gap in verdict["missing"][:_SHOWN]:
        yield f"  missing: {cell(gap)}"
    if len(verdict["missing"]) > _SHOWN:
        yield f"  missing: and {len(verdict['missing']) - _SHOWN} more (-o json)"
    yield from _undecided(incident.get("evidence_coverage") or ())
    yield from _remedy(verdict, incident.get("outcome"))
    yield from _explanation(verdict)
    yield from _earlier(incident, verdict)
    yield from _similar(incident)


def _remedy(verdict: Record, outcome: str | None) -> Iterator[str]:
    if verdict["advice"]:
        text = advice_text(verdict["advice"], verdict["cause"], outcome)
        yield f"  advice: {cell(text)}"
    if verdict.get("retry") and outcome != "recovered":  # then another attempt has succeeded
        yield f"  retry: {cell(retry_text(verdict['retry']))}"
    if not verdict["is_inconclusive"]:
        yield f"  what to do: {_PAGE.format(cell(verdict['cause']).replace('_', '-'))}"


def _undecided(kinds: Sequence[Record]) -> Iterator[str]:
    """The missing evidence that could have decided between causes."""
    for kind in [kind for kind in kinds if kind["decides"]][:_SHOWN]:
        causes = " and ".join(map(cell, kind["decides"][:_SHOWN]))
        why = f" ({cell(kind['reasons'][0])})" if kind["reasons"] else ""
        effect = "decided between" if len(kind["decides"]) > 1 else "confirmed, or ruled out,"
        yield f"  {cell(kind['kind']).replace('_', ' ')}{why} could have {effect} {causes}"


def _culprits(verdict: Record) -> Iterator[str]:
    for name, culprits in (("rank", verdict["culprit_ranks"]), ("node", verdict["culprit_nodes"])):
        if culprits:
            plural = "" if len(culprits) == 1 else "s"
            yield f"  {name}{plural}: {listed(culprits, _SHOWN)}"


def _correction(incident: Record) -> Iterator[str]:
    for correction in incident["corrections"][:1]:
        before = _cause({"cause": correction["was_cause"]})
        was = f", after the verdict had said {before}" if correction["was_cause"] else ""
        how = "confirmed" if correction["is_confirmation"] else "corrected"
        by = cell(correction["corrected_by"])
        when, note = moment(correction["corrected_at"]), cell(correction["note"])
        yield f"  {how} by {by} on {when} UTC{was}: {note}"


def _grounds(verdict: Record) -> Iterator[str]:
    """The claims for and against; a claim without any weight only names who suffered."""
    rows = [
        (f"{claim['weight']:+.2f}", claim["analyzer"], claim["says"])
        for claim in verdict["evidence"]
        if claim["weight"]
    ]
    if rows:
        yield "  it rests on"
        yield from aligned(rows[:_SHOWN], indent=4)


def _other(verdict: Record) -> str:
    return "perhaps" if verdict["is_inconclusive"] else "not"


def _cause(of: Record) -> str:
    return "an unknown cause" if of["cause"] == "unknown" else cell(of["cause"])


def _explanation(verdict: Record) -> Iterator[str]:
    if verdict["explanation"]:
        yield "  in the words of a language model, which decided nothing"
        yield from (f"  │ {line}" for line in clean_lines(verdict["explanation"]))


def _earlier(incident: Record, verdict: Record) -> Iterator[str]:
    """The first verdict, unless a later revision only put it into words."""
    for first in incident["revisions"][-1:]:
        if (first["cause"], first["verdict_reason"]) == (
            verdict["cause"], verdict["verdict_reason"]
        ):  # fmt: skip
            return
        cause = "inconclusive" if first["is_inconclusive"] else _cause(first)
        number = verdict["revision"]
        reason = cell(first["verdict_reason"]).removeprefix("inconclusive: ")
        yield f"  revision {number}; at first it said {cause}: {reason}"


def _similar(incident: Record) -> Iterator[str]:
    for shared, text in (("fingerprint", "the same failure"), ("node", "the same node")):
        others = [other for other in incident["similar"] if other["same"] == shared]
        if others:
            newest = others[0]
            where = f"{cell(newest['incident'])[:SHORT_ID]} of {cell(newest['job'])}"
            count = counted(len(others), "other incident")
            yield f"  {count} with {text}; the newest is {where}, {moment(newest['opened_at'])} UTC"


def _percent(confidence: float | None) -> str:
    return f"{(confidence or 0) * 100:.0f} %"
