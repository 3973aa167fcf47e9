"""Incidents, what was found, and what was decided, as REST shows them."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field

from everstep.store.evidence_copies import LARGEST
from everstep_services.history.api.dto.answer import (
    Answer,
    culprit_headline,
    present,
    with_injection,
)
from everstep_services.history.api.dto.jobs import BudgetOut, Exit, Round, Stall
from everstep_services.history.api.dto.numerics import NumericsCase
from everstep_services.history.api.dto.stragglers import SlowRank

_NAMED_MOST = 6
_OPEN = {
    "killed": "killed by SIGKILL, and nobody on record sent it",
    "segfault": "SIGSEGV: a fault in native code, or a process sent it",
    "bus_error": "SIGBUS: a mapped file was cut short, memory is broken, or a process sent it",
    "signal": "ended by a signal, and nobody on record sent it",
    "unseen": "nobody saw how it ended",
    "worker_killed": "a signal ended a worker of the data loader: memory, or somebody sent it",
    "warden_ended": "a warden ended, and its ranks with it",
    "lost_by_all": "all others ended as ranks do that lost another, and it alone had not ended",
    "stopped_first": "it stopped before all others",
    "elsewhere": "it stands elsewhere than the ranks that wait for it",
    "never_joined": "it never came to a collective that others wait in",
    "no_dump": "others wait for it, and its recorder tells nothing",
}
"""What is known of a failure, by its kind, when its cause is unknown."""


def headlines(shown: Mapping[str, Any]) -> dict[str, str | None]:
    """The headline of an incident, and the first report where the verdict names others."""
    told = shown["story"] or shown["reason"]
    if shown["outcome"] == "repeated":
        told = f"{shown['reason']}; then round {shown['next_round']} ended in the same way"
    headline = culprit_headline(shown, shown["rank"], shown["node"])
    return {
        "headline": headline or with_injection(shown, told),
        "first_report": shown["reason"] if headline else None,
    }


def shown_verdict(row: Mapping[Any, Any]) -> "VerdictOut":
    """A revision of a verdict from its row."""
    shown = present(row)
    return VerdictOut(
        **shown,
        summary=verdict_summary(shown),
        evidence=shown["grounds"] or [],
        missing=shown["gaps"] or [],
    )


def verdict_summary(verdict: Mapping[str, Any]) -> str:
    """The verdict in a line: the cause, and how sure that is; or that the cause is unknown."""
    if verdict["is_inconclusive"]:
        return "inconclusive"
    cause, kind = str(verdict["cause"]), (verdict["cause_kind"] or "").replace("_", " ")
    if cause != "unknown":
        sure = f"{_percent(verdict['confidence'])} sure"
        sure = "a person decided" if verdict["is_corrected"] else sure
        return f"{cause}{', ' if kind else ''}{kind} ({sure})"
    if verdict["is_corrected"]:
        return "cause unknown, a person decided"
    event = _OPEN.get(verdict["cause_kind"] or "", kind)
    who = _who(verdict["culprit_ranks"] or (), verdict["culprit_nodes"] or ())
    sure = f"confidence {_percent(verdict['confidence'])}{f' that {who}' if who else ''}"
    return f"cause unknown{': ' if event else ''}{event}; {sure}"


def _who(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """Which ranks, else which nodes, are the culprits; empty where none is named."""
    named, one, many = (ranks, "rank", "ranks") if ranks else (nodes, "node", "nodes")
    if not named:
        return ""
    if len(named) == 1:
        return f"{one} {named[0]} is the culprit"
    more = f" and {len(named) - _NAMED_MOST} more" if len(named) > _NAMED_MOST else ""
    told = ", ".join(str(name) for name in named[:_NAMED_MOST])
    return f"{many} {told}{more} are the culprits"


def _percent(confidence: float | None) -> str:
    return f"{(confidence or 0) * 100:.0f} %"


def shown_evidence(
    rows: Sequence[Mapping[Any, Any]], copied: Collection[str], keeps_s: float | None, now: datetime
) -> "list[EvidenceOut]":
    """Pieces from their rows: which blobs are copied, and how long the bus keeps the others."""
    return [_shown_piece(present(row), copied, keeps_s, now) for row in rows]


def _shown_piece(
    shown: Mapping[str, Any], copied: Collection[str], keeps_s: float | None, now: datetime
) -> "EvidenceOut":
    blob, at = shown["blob"], shown["at"]
    is_copied = blob is not None and blob.get("id") in copied
    expires_at = None
    if blob is not None and not is_copied and at is not None and keeps_s is not None:
        expires_at = at + timedelta(seconds=keeps_s)
    gone_reason = None
    if expires_at is not None and expires_at <= now:
        is_large = blob["size_bytes"] > LARGEST
        why = f"history copies at most {LARGEST >> 10} KiB" if is_large else "there is no copy"
        gone_reason = f"the bus kept it until {expires_at:%Y-%m-%d %H:%M} UTC, and {why}"
    return EvidenceOut(**shown, is_copied=is_copied, expires_at=expires_at, gone_reason=gone_reason)


class LedgerOut(Answer):
    """Where an incident's time went: the entries sum to its wall time."""

    unfinished_s: float
    """The time from the last progress until a rank ended: the step was cut off."""
    detect_s: float
    """From there, or from the last progress if no rank ended, to the first report."""
    evidence_s: float
    """The time to collect evidence before the ranks were stopped."""
    decide_s: float = Field(description="The time until the decision what to do, backoff included.")
    stop_s: float
    """The time until the last rank was gone and its accelerator free."""
    rendezvous_s: float = Field(description="The time until the next round had formed.")
    start_s: float = Field(description="The time until the last rank of that round ran.")
    restore_s: float = Field(description="The time until the state was restored.")
    heal_s: float
    """The time until all ranks had their states, where some had kept theirs."""
    first_step_s: float
    """The time until the first step was finished, or a collective began if none was seen."""
    no_step_s: float
    """The time for which later rounds ran that ended without a step."""
    other_s: float = Field(description="Time that belongs to none of these.")
    wall_s: float = Field(description="The sum of all entries.")


class Incident(Answer):
    """From the first sign of trouble to the next good step."""

    job: str
    incident: str = Field(description="The incident's id.")
    outcome: str | None = Field(examples=["recovered"])
    """`recovered`, `repeated` (then the same failure ended the next round, too), `stopped`,
    `failed`, `preempted` or `merged`; null while open."""
    opened_at: datetime | None
    closed_at: datetime | None
    trigger: str | None = Field(examples=["rank_exited"])
    """The kind of the first report."""
    headline: str | None
    """The sentence to read first: the verdict where it names other culprits than the first report,
    otherwise the story or the reason."""
    first_report: str | None
    """The first report, where the verdict names other culprits; otherwise null."""
    reason: str | None
    """The first report: what happened, to which rank or node, and which limit was passed."""
    story: str | None
    """The whole incident in a sentence or two, once it is closed."""
    round: int | None = Field(description="The round that it broke.")
    next_round: int | None = Field(description="The round in which it recovered.")
    node: str | None = Field(description="The node that the first report is about.")
    rank: int | None = Field(description="The rank that the first report is about.")
    step: int | None = Field(description="The last step before it.")
    phase: str | None
    section: str | None
    progress_at: datetime | None
    """The time of the training's last progress before the incident."""
    ranks_affected: int | None
    nodes_affected: list[str] | None
    reports: int | None = Field(description="The number of reports that belong to this incident.")
    extended_reason: str | None = Field(description="The later reports in one text.")
    ledger: LedgerOut | None
    """Where the time went; null while the incident is open."""
    lost_steps: int | None
    """Steps that had to be trained again after a restart; null if that is not known, because the
    script does not number its steps, or shows none, or because the training did not go on in this
    launch."""
    lost_s: float | None = Field(description="The time that those steps had taken.")
    restored_step: int | None
    restored_tier: str | None
    merged_into: str | None
    cause: str | None = Field(examples=["user_code"])
    """The cause class of the verdict that holds; null while there is none."""
    confidence: float | None = Field(description="The confidence of this verdict, 0 to 1.")
    culprit_ranks: list[int] | None = Field(description="The ranks that this verdict names.")
    culprit_nodes: list[str] | None = Field(description="The nodes that it names.")
    culprit_rank_nodes: list[str] = Field([])
    """The nodes on which these ranks ran, which need not be at fault; those of the first eight
    ranks."""
    fingerprint: str | None = Field(description="A hash that is equal for equal failures.")
    trigger_fact: str | None = Field(description="The id of the first report's fact.")
    opened_fact: str | None
    closed_fact: str | None
    first_n: int | None = Field(description="The place of its first fact in the log.")
    last_n: int | None


class OptionOut(Answer):
    """An action that was considered and not taken."""

    action: str
    rejected: str = Field(description="Why the action was not taken, with the limit that decided.")


class Action(Answer):
    """A decision and its outcome."""

    decision: str = Field(description="The id of its fact.")
    job: str
    incident: str | None
    round: int | None
    action: str = Field(examples=["restart"])
    mode: str | None
    """`enforce`, or `observe` if the decision was only recorded and not carried out."""
    rule: str | None = Field(description="The rule that decided.", examples=["restart.budget_left"])
    reason: str | None
    decided_at: datetime | None
    decided_by: str | None
    decide_s: float | None = Field(description="The time from the first report to the decision.")
    delay_s: float | None
    """How long the action waited before it began, for a backoff."""
    budgets: list[BudgetOut] | None
    """The rest of each limit after the decision."""
    considered: list[OptionOut] | None
    """The other actions that were considered."""
    unknowns: list[str] | None
    """What was not known at the time of the decision."""
    rests_on: list[str] | None = Field(description="The ids of the facts that it rests on.")
    nodes_out: list[str] | None = Field(description="Nodes that lose their slot by this action.")
    nodes_in: list[str] | None = Field(description="Nodes that get a slot by this action.")
    outcome: str | None
    """`done`, `failed`, `observed` or `overtaken`; of what is done about a slow rank, `asked`,
    `observed` or `refused`; null while it is not recorded."""
    outcome_reason: str | None
    taken_at: datetime | None
    took_s: float | None = Field(description="The time from the decision until it was carried out.")


class EvidenceOut(Answer):
    """A piece of evidence, or why there is none."""

    id: str = Field(description="The id of its fact.")
    at: datetime | None
    node: str | None
    rank: int | None = Field(description="The rank; null if the evidence is about the node.")
    round: int | None
    kind: str | None = Field(description="`exception`, `log`, `stacks`, `gpu` …")
    stream: str | None = Field(description="`stdout` or `stderr`, for the end of a log.")
    summary: str | None = Field(description="The evidence in a line.")
    blob: dict[str, Any] | None
    """The blob on the bus: job, id, size_bytes, parts. Its content is at
    `/incidents/{incident}/evidence/{id}`."""
    missing_reason: str | None = Field(description="Why the evidence is missing.")
    took_s: float | None
    is_copied: bool
    """History has a copy of its content, which outlasts the bus: until `history.keep_log_bytes` are
    full."""
    expires_at: datetime | None
    """Until when the bus keeps its content; null where there is none, or a copy, or while nobody
    can say."""
    gone_reason: str | None = Field(
        examples=["the bus kept it until 2026-12-24 08:00 UTC, and history copies at most 128 KiB"]
    )
    """Why its content is no longer there; null as long as it can be fetched."""


class AlternativeOut(Answer):
    """Another explanation, and why it was not chosen."""

    cause: str
    confidence: float
    reason: str
    ranks: list[int]
    nodes: list[str]


class GroundOut(Answer):
    """Evidence that a verdict rests on."""

    says: str = Field(examples=["rank 7 never entered all_reduce 1204"])
    analyzer: str = Field(description="The analyzer that found it.", examples=["flight_recorder"])
    fact: str | None = Field(description="The fact that it comes from.")
    weight: float
    """How much the finding counts; below 0 when it speaks against the verdict."""


class VerdictOut(Answer):
    """Who or what caused the incident, and the kind of failure."""

    verdict_fact: str
    verdict_at: datetime | None
    revision: int | None = Field(description="Grows when later evidence changes the verdict.")
    summary: str = Field(examples=["user_code, python exception (93 % sure)"])
    """The verdict in a line."""
    verdict_reason: str | None
    cause: str | None = Field(examples=["user_code"])
    cause_kind: str | None = Field(examples=["python_exception"])
    """The kind of failure, finer than the cause."""
    confidence: float | None = Field(description="0 to 1.")
    is_inconclusive: bool | None
    """No explanation is probable enough: see the alternatives."""
    is_corrected: bool | None = Field(description="A person gave this verdict, so it holds.")
    culprit_ranks: list[int] | None
    culprit_nodes: list[str] | None
    advice: str | None
    """`restart`, `restart_without` (the culprit nodes), `restart_elsewhere`, `stop`, `change`
    (something first: a restart only shows whether it comes again), `wait`, `inform`."""
    is_transient: bool | None
    retry: str | None
    """Whether another attempt may succeed: `as_is`, `without_node` (the culprit nodes),
    `after_change`, `never`, `unknown`; empty for verdicts of older releases."""
    fingerprint: str | None = Field(description="Equal for the same bug.")
    evidence: list[GroundOut]
    """The evidence that it rests on, the weightiest first."""
    alternatives: list[AlternativeOut] | None
    missing: list[str]
    """The evidence that would have helped and is missing, with the reason."""
    analyzers: list[str] = Field(description="The analyzers that contributed evidence.")
    explanation: str | None
    """The explanation by a language model, if one is set; it had no part in the verdict."""
    took_s: float | None
    """The time from the opening of the incident to the verdict."""


class EvidenceCoverageOut(Answer):
    """How much of one kind of evidence a verdict had."""

    kind: str = Field(description="`exception`, `log`, `flight_recorder`, `stacks` …")
    pieces: int = Field(description="The pieces that are there.")
    missing: int = Field(description="The pieces that agents could not collect.")
    reasons: list[str] = Field(examples=[["no agent has sent any"]])
    """Why pieces are missing; at most 3."""
    decides: list[str] = Field(examples=[["user_code", "network"]])
    """The causes between which the missing pieces could have decided: a single one where the
    verdict leaves open whether it is the cause, none where they could not have changed the
    verdict."""


class CorrectionOut(Answer):
    """A correction or confirmation of a verdict by a person."""

    correction_fact: str
    corrected_at: datetime | None
    corrected_by: str | None = Field(examples=["ann@login-1 (ops)"])
    cause: str | None
    note: str | None = Field(description="Why, in their words.")
    culprit_ranks: list[int] | None
    culprit_nodes: list[str] | None
    was_cause: str | None
    """The cause of the previous verdict; null if there was none."""
    is_confirmation: bool | None = Field(description="It confirms the verdict.")


class SimilarIncident(Answer):
    """Another incident with the same failure or the same node."""

    job: str
    incident: str
    same: str = Field(description="`fingerprint` or `node`: what they have in common.")
    opened_at: datetime | None
    outcome: str | None
    cause: str | None
    headline: str | None
    reason: str | None
    node: str | None
    rank: int | None


class Located(Answer):
    """Which ranks stopped first, and how many only waited for them."""

    id: str = Field(description="The id of its fact.")
    n: int | None
    at: datetime | None
    first_ranks: list[int] | None = Field(description="The ranks that stopped first; at most 100.")
    first_nodes: list[str] | None
    waiting_ranks: int | None = Field(description="The number of other ranks, which only waited.")
    section: str | None = Field(description="The section that the first ranks are in.")
    lead_s: float | None = Field(description="How long before all others the first ranks stopped.")
    is_certain: bool | None
    """Every beat that could contradict the finding has arrived."""
    reason: str | None = Field(description="The order of events, as far as beats can show it.")


class Primary(Exit):
    """The exit that the incident is about, with the whole of its traceback."""

    traceback: str | None = Field(description="The complete fact, as it was recorded.")


class IncidentDetail(Incident):
    """The whole story of an incident."""

    primary: Primary | None
    """The exit that explains the others: that of a culprit, else the one that the first decision
    rests on, else the one that was reported first; null when no rank exited, or none of the
    culprits."""
    stall: Stall | None = Field(description="The stall of that rank; null if it did not stall.")
    stalls: list[Stall]
    """All ranks that had stalled and did not move again before; at most 50."""
    located: Located | None
    """Which ranks stopped first; null if no rank stalled, or if this is unknown."""
    slow_ranks: list[SlowRank]
    """Ranks that were slow when it began, or until ten minutes before; at most 50."""
    numerics: NumericsCase | None
    """The result that cannot be right; null for incidents of other kinds."""
    verdict: VerdictOut | None
    """The verdict in force; null until attribution has reached one."""
    revisions: list[VerdictOut]
    """Earlier verdicts, and those that a correction overrules, the newest first."""
    corrections: list[CorrectionOut]
    """Corrections by people, the newest first: the first one holds."""
    similar: list[SimilarIncident]
    """Incidents of any job with the same failure, then those of the same node, each the newest
    first; at most 20."""
    exits: list[Exit] = Field(description="The first failures of the round; at most 50.")
    evidence: list[EvidenceOut] = Field(description="In the order of the log; at most 200.")
    evidence_coverage: list[EvidenceCoverageOut]
    """For each kind of evidence, what the verdict had of it, what was missing and why, and what the
    missing pieces could have decided; empty while there is no verdict."""
    actions: list[Action] = Field(description="In the order of the log; at most 200.")
    rounds: list[Round]
    """The round that it broke, and the rounds that should bring the training back."""
    nodes_out: list[str]
    """Nodes that had a slot before the incident, and have none after it; at most 200."""
    nodes_in: list[str]
    """Nodes that have a slot after the incident, and had none before it; at most 200."""
