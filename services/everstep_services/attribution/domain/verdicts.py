"""Makes the fact of a verdict, if it differs from the last verdict."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.messages import (
    Alternative,
    Case,
    CorrectVerdict,
    EvidenceItem,
    VerdictCorrected,
    VerdictReached,
)
from everstep.messages.base import Time, shared
from everstep.observe.printable import beginning
from everstep_services.attribution.domain.claims import Claim, cause_of
from everstep_services.attribution.domain.combiner import CaseJudgement, combine

SOURCE = "attribution"
NOT_EXPLAINED = "the explanation by a language model failed"
"""Something that is missing of one revision: the judgement does not know it."""
_SURER = 0.1
"""A smaller change of the confidence makes no new revision."""
_MISSING_MOST = 32
_TEXT_MOST = 500
_TOLD_NODES = 8


@dataclass(frozen=True, slots=True)
class VerdictContext:
    """The time, and how ids are made."""

    wall: Time
    new_id: Callable[[], str]


def concluded(case: Case, judged: CaseJudgement, now: VerdictContext) -> VerdictReached | None:
    """The verdict to record; None if it would repeat the last one."""
    if case.correction is not None:
        return None  # a person has named the cause
    verdict = _fact(case, judged, now)
    return verdict if case.verdict is None or differs(case.verdict, verdict) else None


def differs(before: VerdictReached, now: VerdictReached) -> bool:
    """Whether a reader would act or think differently, or read what later evidence refutes."""
    if _told(before) != _told(now) or abs(before.confidence - now.confidence) >= _SURER:
        return True
    come = {text for text in before.missing if not text.startswith(NOT_EXPLAINED)}
    refuted = {item.says for item in before.evidence} - {item.says for item in now.evidence}
    return bool(refuted or come - set(now.missing))


def unknown_culprits(case: Case, ask: CorrectVerdict) -> str:
    """The ranks and nodes of a correction that the incident does not have, in words."""
    nodes = {member.node for member in case.members} | {sign.node for sign in case.nodes}
    nodes |= {end.node for end in case.ends}
    strange = [name for name in ask.culprit_nodes if nodes and name not in nodes]
    if strange:
        names = ", ".join(sorted(nodes)[:_TOLD_NODES])
        return f"this incident has no node {strange[0][:80]!r}: its nodes are {names}"
    beyond = [rank for rank in ask.culprit_ranks if 0 < case.world_size <= rank]
    if beyond:
        return f"there is no rank {beyond[0]}: the round had ranks 0 to {case.world_size - 1}"
    return ""


def corrected(
    case: Case, ask: CorrectVerdict, now: VerdictContext
) -> tuple[VerdictCorrected, VerdictReached]:
    """The fact of a person's correction, and the verdict in force from now on."""
    cause, was = cause_of(ask.cause), case.verdict
    correction = VerdictCorrected(
        **{**shared(VerdictCorrected, ask), "cause": cause},
        id=now.new_id(),
        at=now.wall,
        source=SOURCE,
        round=case.round,
        note=beginning(ask.reason, _TEXT_MOST),
        verdict=None if was is None else was.id,
        was_cause="" if was is None else was.cause,
        is_confirmation=was is not None and _is_same(was, ask),
    )
    says = f"{ask.by} says: {beginning(ask.reason, _TEXT_MOST)}"
    claim = Claim(
        cause=cause, kind="said_by_a_person", says=says, strength=1.0, analyzer="person",
        ranks=ask.culprit_ranks, nodes=ask.culprit_nodes, fact=correction.id,
        fingerprint="" if was is None else was.fingerprint,
    )  # fmt: skip
    verdict = _fact(case, combine(case, [claim], ()), now)
    others = () if was is None else _overruled(was, is_same=_is_same(was, ask))
    return correction, replace(
        verdict,
        reason=says,
        confidence=1.0,
        is_corrected=True,
        is_inconclusive=False,
        cause=cause,
        culprit_ranks=ask.culprit_ranks,
        culprit_nodes=ask.culprit_nodes,
        alternatives=others,
    )


def _is_same(was: VerdictReached, ask: CorrectVerdict) -> bool:
    return (was.cause, set(was.culprit_ranks), set(was.culprit_nodes)) == (
        cause_of(ask.cause), set(ask.culprit_ranks), set(ask.culprit_nodes)
    )  # fmt: skip


def _overruled(was: VerdictReached, *, is_same: bool) -> tuple[Alternative, ...]:
    """The verdict that evidence gave; a correction that was corrected in turn leaves no trace."""
    if was.is_corrected:
        return was.alternatives
    if is_same:
        return ()
    overruled = Alternative(
        cause=was.cause, confidence=was.confidence, ranks=was.culprit_ranks,
        nodes=was.culprit_nodes, reason=f"{was.reason}; a person has corrected it",
    )  # fmt: skip
    return (overruled,)


def _told(verdict: VerdictReached) -> tuple[object, ...]:
    return (
        verdict.cause, verdict.kind, verdict.culprit_ranks, verdict.culprit_nodes,
        verdict.advice, verdict.is_inconclusive, verdict.is_transient, verdict.retry,
    )  # fmt: skip


def _fact(case: Case, judged: CaseJudgement, now: VerdictContext) -> VerdictReached:
    took = max((now.wall - case.opened_at).total_seconds(), 0.0) if case.opened_at else 0.0
    lists = {
        "evidence": tuple(_item(claim, weight) for claim, weight in judged.evidence),
        "missing": tuple(beginning(text, _TEXT_MOST) for text in judged.missing[:_MISSING_MOST]),
    }
    return VerdictReached(
        id=now.new_id(),
        job=case.job,
        at=now.wall,
        source=SOURCE,
        round=case.round,
        incident=case.incident,
        **{**shared(VerdictReached, judged), **lists},
        culprit_ranks=judged.ranks,
        culprit_nodes=judged.nodes,
        alternatives=tuple(
            Alternative(**shared(Alternative, other)) for other in judged.others
        ),
        analyzers=tuple(dict.fromkeys(claim.analyzer for claim, _ in judged.evidence)),
        revision=0 if case.verdict is None else case.verdict.revision + 1,
        took_s=round(took, 3),
    )  # fmt: skip


def _item(claim: Claim, weight: float) -> EvidenceItem:
    return EvidenceItem(
        says=claim.says, analyzer=claim.analyzer, fact=claim.fact, blob=claim.blob, weight=weight
    )
