"""Ranks that were slow when the incident began: a weak sign, of the same place."""

from collections.abc import Mapping, Sequence

from everstep_services.attribution.domain.claims import Cause, Claim
from everstep_services.attribution.incident import Incident

_CAUSES: Mapping[str, Cause] = {
    "input": "data", "compute": "user_code", "host": "host", "network": "network", "device": "gpu",
}  # fmt: skip
_MOST = 8


async def analyze(incident: Incident) -> Sequence[Claim]:
    """One claim for each open finding."""
    return [
        Claim(
            cause=_CAUSES.get(straggler.cause, "unknown"),
            kind=f"slow_{straggler.cause}"[:64],
            says=f"rank {straggler.rank} ({straggler.node}) had been slow: {straggler.reason}",
            strength=0.35 * (straggler.confidence if straggler.confidence is not None else 0.7),
            ranks=(straggler.rank,),
            fact=straggler.fact,
        )
        for straggler in incident.case.slow[:_MOST]
        if straggler.cause != "design"
    ]
