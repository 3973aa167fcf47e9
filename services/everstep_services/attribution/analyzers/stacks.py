"""Claims from stacks: which rank stands elsewhere while others wait, and what it does there."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from everstep_services.attribution.analyzers.rank_ends import has_torn
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.report import StackReport
from everstep_services.attribution.stack_analysis.rules import shipped
from everstep_services.attribution.stack_analysis.stacks import Unreadable

_SUSPECTS_MOST = 8
_MORE_SUSPECTS = 0.5
"""The factor for the strength of each suspect if there are more than two."""
_ENDING = 0.3
"""The factor for ranks that are ending, or while another one has ended: mostly because of that."""
_IN_TRANSFER = 0.5
"""The factor for ranks that wait in transfers: their stacks do not tell for whom."""
_OWN_DOMAIN = 0.75
"""The strength of a stack's claim about the cause, relative to its claim about the place."""


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from all stacks together; none if there are no stacks."""
    dumps, fact = await incident.by_rank("stacks")
    if not dumps:
        return ()
    late = incident.given_up.get("stacks", {})
    report = await asyncio.to_thread(_report, dumps, late, incident.case.world_size or None)
    if report.verdict != "odd_ranks":
        return ()
    ended = {end.rank for end in incident.case.ends}
    if all(it.activity == "exit" and it.rank in ended for it in report.suspects):
        return ()  # their ends tell more
    return list(_claims(report, fact, await asyncio.to_thread(has_torn, incident.case)))


def _report(dumps: Mapping[int, bytes], late: Mapping[int, str], world: int | None) -> StackReport:
    analysis = StackAnalysis(world=world, rules=shipped())
    for rank, reason in late.items():
        analysis.add(Unreadable(name=f"rank {rank}", reason=reason, rank=rank, is_evidence=False))
    for rank, data in dumps.items():
        analysis.add(read_content(data, rank, f"rank {rank}"))
    return analysis.report()


def _claims(report: StackReport, fact: str | None, is_torn: bool) -> Iterator[Claim]:
    suspects = report.suspects[:_SUSPECTS_MOST]
    if report.pattern == "together":
        # Ranks at several places do not make the same mistake: a recorder may know who does.
        is_of_all = len({suspect.reason for suspect in report.suspects}) == 1
        yield Claim(
            cause="user_code", kind="one_sided_transfer", says=report.summary, fact=fact,
            strength=report.confidence, fingerprint="hang:one_sided_transfer",
            ranks=tuple(suspect.rank for suspect in report.suspects) if is_of_all else (),
        )  # fmt: skip
        return
    parts = 1.0 if len(report.suspects) <= 2 else _MORE_SUSPECTS
    if is_torn or all(suspect.activity == "exit" for suspect in suspects):
        parts *= _ENDING
    elif all(suspect.activity == "point_to_point" for suspect in suspects):
        parts *= _IN_TRANSFER
    strength = min(report.confidence, 1.0) * parts
    yield Claim(
        cause="unknown", kind="elsewhere", role="place", says=report.summary, strength=strength,
        ranks=tuple(suspect.rank for suspect in suspects), fact=fact,
    )  # fmt: skip
    for suspect in suspects:
        cause = suspect.domain
        if cause != "unknown":
            yield Claim(
                cause=cause, kind=f"in_{suspect.activity}", strength=strength * _OWN_DOMAIN,
                says=f"rank {suspect.rank}: {suspect.reason}", ranks=(suspect.rank,), fact=fact,
                fingerprint=f"hang:{suspect.activity}",
            )  # fmt: skip
