"""Claims from judgements of results that cannot be right: the ranks have computed them again."""

from collections.abc import Sequence

from everstep.incident_causes import NUMERICS
from everstep.messages import Case, NumericsJudged
from everstep.messages.facts.numerics import told_data
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import MOST_SAID, Claim
from everstep_services.attribution.incident import Incident

CORRUPTED = "silent_corruption"
"""The kind of a verdict on a part that computes wrongly and reports nothing."""
_REPRODUCED, _ONCE, _ODD, _UNDECIDED, _OPEN = 0.95, 0.8, 0.85, 0.55, 0.4


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return a claim for each judgement; a weak one where a result was not judged."""
    case = incident.case
    if case.results:
        return [_of_result(case, result) for result in case.results]
    if case.trigger != NUMERICS or case.ends:
        return ()
    return [
        Claim(
            cause="unknown", kind="unexpected_result", says=case.reason, strength=_OPEN,
            ranks=() if case.rank is None else (case.rank,), fact=case.trigger_fact,
        )
    ]  # fmt: skip


def _of_result(case: Case, result: NumericsJudged) -> Claim:
    nodes = _nodes(case, result)
    match result.kind:
        case "persistent":
            return _of_device(result, nodes, _REPRODUCED, is_transient=False)
        case "transient":
            return _of_device(result, nodes, _ONCE, is_transient=True)
        case "replica_differs" if len(nodes) == 1 and _is_minority(case, result):
            return _of_device(result, nodes, _ODD, is_transient=None)
        case "correct_but_unexpected":
            return _of_data(result)
        case _:
            return Claim(
                cause="unknown", kind=result.kind or "unexpected_result", says=_told(result),
                strength=_UNDECIDED, ranks=result.ranks, fact=result.id,
            )  # fmt: skip


def _of_device(
    result: NumericsJudged, nodes: tuple[str, ...], strength: float, *, is_transient: bool | None
) -> Claim:
    """A device computes wrongly; if it may be one of several nodes, none of them is accused."""
    cause: VerdictCause = "gpu" if result.device else "host"
    is_one = len(nodes) == 1
    return Claim(
        cause=cause, kind=CORRUPTED, says=_told(result), ranks=result.ranks,
        nodes=nodes if is_one else (), strength=strength if is_one else _UNDECIDED,
        is_transient=is_transient, fact=result.id,
    )  # fmt: skip


def _of_data(result: NumericsJudged) -> Claim:
    """Every device computes the same: the batch is the reason, or what the script makes of it."""
    if result.samples_from is None or result.samples_to is None:
        return Claim(
            cause="user_code", kind=result.kind, says=_told(result), strength=_ONCE,
            is_transient=False, fact=result.id,
        )  # fmt: skip
    data = told_data(result.samples_from, result.samples_to)
    return Claim(
        cause="data", kind=result.kind, says=f"{_told(result)}, with {data}", strength=_ONCE,
        is_transient=False, fact=result.id,
    )  # fmt: skip


def _is_minority(case: Case, result: NumericsJudged) -> bool:
    """Whether most replicas are equal: of two that differ nobody knows which is wrong."""
    return len(result.ranks) == 1 or 2 * len(result.ranks) < sum(it.ranks for it in case.members)


def _told(result: NumericsJudged) -> str:
    told = f"step {result.step}: {result.reason}"[: MOST_SAID - 100]
    if not result.group or result.group in result.reason:
        return told
    return f"{told}; {result.group} is the first group that differs"


def _nodes(case: Case, result: NumericsJudged) -> tuple[str, ...]:
    """The node that the judgement names, and those of the other ranks that it names."""
    on = {
        rank: member.node
        for member in case.members
        for rank in range(member.first_rank, member.first_rank + member.ranks)
    }
    nodes = [on[rank] for rank in result.ranks[0 if not result.node else 1 :] if rank in on]
    return tuple(dict.fromkeys([*([result.node] if result.node else []), *nodes]))
