"""Ranks that were slow when the incident began: a weak sign, of the same place."""

from collections.abc import Sequence
from typing import assert_never

from everstep.slow_rank_causes import SlowRankCause, known_slow_rank_cause
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident

_MOST = 8


async def analyze(incident: Incident) -> Sequence[Claim]:
    """One claim for each open finding."""
    return [
        Claim(
            cause=_cause_of(known_slow_rank_cause(straggler.cause)),
            kind=f"slow_{straggler.cause}"[:64],
            says=f"rank {straggler.rank} ({straggler.node}) had been slow: {straggler.reason}",
            strength=0.35 * (straggler.confidence if straggler.confidence is not None else 0.7),
            ranks=(straggler.rank,),
            fact=straggler.fact,
        )
        for straggler in incident.case.slow[:_MOST]
        if straggler.cause != "design"
    ]


def _cause_of(cause: SlowRankCause) -> VerdictCause:
    match cause:
        case "input":
            return "data"
        case "compute":
            return "user_code"
        case "device":
            return "gpu"
        case "host" | "network" | "injected" | "unknown":
            return cause
        case "design":  # nobody is at fault, so there is no claim
            return "unknown"
        case _:
            assert_never(cause)
