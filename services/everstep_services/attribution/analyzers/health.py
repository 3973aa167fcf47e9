"""Claims from checks and the history of nodes about the nodes of an incident."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from everstep.messages import Case, NodeSign
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import SUSPECTED, Claim
from everstep_services.attribution.incident import Incident

_CHECKS: Mapping[str, VerdictCause] = {
    "gpu": "gpu", "nvlink": "gpu", "gpu_selftest": "gpu", "selftest": "gpu",
    "nic": "network", "infiniband": "network", "network": "network", "link": "network",
    "storage": "storage", "host": "host", "kernel": "host", "memory": "host",
}  # fmt: skip
_FAULTS = frozenset({"reset", "reboot", "drain", "replace"})
_NEAR = timedelta(minutes=15)
"""A check that failed within this time before or after the incident counts fully."""
_DAY = timedelta(days=1)


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from health's findings about the incident's nodes."""
    case = incident.case
    signs = _newest(case)
    everywhere = _everywhere(case, signs)
    return [claim for sign in signs for claim in _of_sign(case, sign, everywhere)]


def _newest(case: Case) -> list[NodeSign]:
    """Failed checks and suspicions that still stood at the incident's end."""
    open_signs: dict[tuple[str, str, str], NodeSign] = {}
    for sign in case.nodes:
        match sign.sign:
            case "check" | "suspected":
                open_signs[(sign.node, sign.sign, sign.check)] = sign
            case "passed":
                open_signs.pop((sign.node, "check", sign.check), None)
            case "cleared":
                open_signs.pop((sign.node, "suspected", ""), None)
            case _:
                pass  # lost, returned, left: `ends` covers how nodes ended
    return list(open_signs.values())


def _everywhere(case: Case, signs: Sequence[NodeSign]) -> frozenset[str]:
    """Checks that fail on most nodes: the check itself, or a shared part, is to blame."""
    failed: dict[str, set[str]] = defaultdict(set)
    for sign in signs:
        if sign.sign == "check":
            failed[sign.check].add(sign.node)
    nodes = len(case.members)
    return frozenset(name for name, on in failed.items() if nodes > 1 and 2 * len(on) > nodes)


def _of_sign(case: Case, sign: NodeSign, everywhere: frozenset[str]) -> Iterator[Claim]:
    if sign.sign == "suspected":
        yield Claim(
            cause="host", kind=SUSPECTED, says=f"{sign.node} is suspect: {sign.reason}",
            strength=0.3, nodes=(sign.node,), fact=sign.fact,
        )  # fmt: skip
        return
    if sign.failure_class not in _FAULTS or sign.check in everywhere:
        return
    age = abs(case.opened_at - sign.at) if case.opened_at else timedelta()
    if age > _DAY:
        return
    code = f" ({sign.code})" if sign.code else ""
    yield Claim(
        cause=_CHECKS.get(sign.check, "host"),
        kind=f"check_{sign.check}"[:64],
        says=f"{sign.node} failed the check {sign.check}: {sign.reason}{code}",
        strength=0.9 if age <= _NEAR else 0.45,
        nodes=(sign.node,),
        ranks=_ranks_of(case, sign.node),
        fact=sign.fact,
    )


def _ranks_of(case: Case, node: str) -> tuple[int, ...]:
    """The ranks of the node that are known to have failed."""
    told = Counter(end.rank for end in case.ends if end.node == node)
    told.update(stall.rank for stall in case.stalls if stall.node == node)
    return tuple(sorted(told))[:64]
