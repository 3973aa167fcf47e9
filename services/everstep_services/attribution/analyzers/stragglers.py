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
            cause=_CAUSES.get(one.cause, "unknown"),
            kind=f"slow_{one.cause}"[:64],
            says=f"rank {one.rank} ({one.node}) had been slow: {one.reason}",
            strength=0.35 * (one.confidence if one.confidence is not None else 0.7),
            ranks=(one.rank,),
            fact=one.fact,
        )
        for one in incident.case.slow[:_MOST]
        if one.cause != "design"
    ]
