"""Claims from NCCL's RAS: processes that stopped answering, and ranks that are out of step."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from everstep.evidence.nccl_ras import RasFinding, RasReport, findings, parse
from everstep.observe.printable import beginning
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import Claim, Role
from everstep_services.attribution.incident import Incident

_READINGS: Mapping[str, Sequence[tuple[Role, VerdictCause, float]]] = {
    "silent": (("place", "unknown", 0.8), ("root", "host", 0.3)),
    # The rank is elsewhere; other evidence may show where. If none does, it is mostly the script.
    "behind": (("place", "unknown", 0.9), ("root", "user_code", 0.35)),
    "ahead": (("place", "unknown", 0.6), ("root", "user_code", 0.3)),
    "differs": (("root", "user_code", 0.9),),
}
"""The claims that a kind of finding makes."""
_MANY = 2
"""More ranks than this are named with half the strength."""
_RANKS_MOST = 8


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Claims about each group of ranks that differ, wherever they do first."""
    claims: dict[tuple[int, ...], Sequence[Claim]] = {}
    async for piece, _, answer in incident.contents("nccl_ras"):
        try:
            report = await asyncio.to_thread(parse, answer)
        except ValueError as error:
            incident.missing.append(beginning(f"nccl_ras of {piece.node}: {error}", 300))
            continue
        for ranks, finding in _of_world(report, incident.case.world_size):
            claims.setdefault(ranks, [*_claims(finding, ranks, piece.fact)])
    return [claim for of_ranks in claims.values() for claim in of_ranks]


def _of_world(report: RasReport, world: int) -> Iterator[tuple[tuple[int, ...], RasFinding]]:
    """The findings about ranks whose number in the world is known: by a group of all ranks."""
    numbers = {
        (rank.host, rank.pid): rank.rank
        for group in report.communicators
        if group.size == world
        for rank in (*group.ranks, *group.missing_ranks)
    }
    for finding in findings(report):
        ranks = {numbers.get((rank.host, rank.pid), -1) for rank in finding.ranks}
        if -1 not in ranks:
            yield tuple(sorted(ranks)), finding


def _claims(finding: RasFinding, ranks: tuple[int, ...], fact: str | None) -> Iterator[Claim]:
    named = ", ".join(map(str, ranks[:_RANKS_MOST])) + (" …" if len(ranks) > _RANKS_MOST else "")
    for role, cause, strength in _READINGS[finding.kind]:
        kind = "mismatch" if finding.kind == "differs" else f"ras_{finding.kind}"
        yield Claim(
            cause=cause,
            kind=kind,
            role=role,
            says=f"NCCL: {'rank' if len(ranks) == 1 else 'ranks'} {named} {finding.says}",
            strength=strength if len(ranks) <= _MANY else strength / 2,
            ranks=ranks[:_RANKS_MOST],
            fact=fact,
            fingerprint=kind if role == "root" else "",
        )
