"""Claims from earlier incidents: the same failure in this job, in others, and on these nodes."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from everstep.messages import Case, PastIncident
from everstep_services.attribution.analyzers.rank_ends import (
    fingerprint_of,
    fingerprints,
    first_ends,
)
from everstep_services.attribution.domain.claims import Claim, cause_of, fingerprint_in
from everstep_services.attribution.incident import Incident

_NODE_OFTEN = 2


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from earlier incidents."""
    return await asyncio.to_thread(_of_case, incident.case)


def _of_case(case: Case) -> list[Claim]:
    return [*_repeated(case), *_seen_before(case), *_nodes(case)]


def _repeatable(case: Case) -> Iterator[tuple[str, list[int]]]:
    """The failures, with their ranks, that would be the same if they came again.

    A signal is not: somebody else may have sent it. Nor is a code by which ranks ask for something.
    """
    others = {fingerprint_of(end) for end in case.ends if end.how == "signal" or end.asks}
    yield from (failure for failure in fingerprints(case).items() if failure[0] not in others)


def _repeated(case: Case) -> Iterator[Claim]:
    """The same failure in further rounds of this incident, without a step in between."""
    judged = {end.round for end in first_ends(case)}
    later = {end.round for end in case.ends if judged and end.round > min(judged)}
    for name, ranks in _repeatable(case):
        rounds = {end.round for end in case.ends if fingerprint_of(end) == name} & later
        if rounds:
            more = _counted(len(rounds), "more round")
            yield _same(name, ranks, f"it came again in {more} without a new step", 0.8)


def _seen_before(case: Case) -> Iterator[Claim]:
    for name, ranks in _repeatable(case):
        same = {name, fingerprint_in(case.job, name)}
        alike = [incident for incident in case.past if incident.fingerprint in same]
        own = [incident for incident in alike if incident.job == case.job]
        if own and not _has_advanced(case, own[-1]):
            ended = _counted(len(own), "round")
            yield _same(name, ranks, f"the same failure had ended {ended} of this job", 0.7, own)
        elif alike:
            jobs = _counted(len({incident.job for incident in alike}), "job")
            seen = _counted(len(alike), "incident")
            yield Claim(
                cause=cause_of(alike[-1].cause), kind="seen_before", fingerprint=name,
                ranks=tuple(ranks), strength=0.4,
                says=f"the same failure was seen in {seen} of {jobs}",
            )  # fmt: skip


def _same(
    name: str, ranks: Sequence[int], says: str, strength: float, own: Sequence[PastIncident] = ()
) -> Claim:
    return Claim(
        cause=cause_of(own[-1].cause) if own and own[-1].is_corrected else "unknown",
        kind="same_failure",
        says=says,
        strength=strength,
        ranks=tuple(ranks),
        is_transient=False,
        fingerprint=name,
    )


def _has_advanced(case: Case, before: PastIncident) -> bool:
    """Whether the training has got further than at that incident: then nothing blocks it."""
    step = case.last_step
    return step is not None and step > (before.step or 0)


def _nodes(case: Case) -> Iterator[Claim]:
    """Nodes that were culprits more than once recently."""
    names = {member.node for member in case.members}
    counts = Counter(
        node for incident in case.past for node in set(incident.nodes) if node in names
    )
    for node, count in counts.most_common(4):
        if count >= _NODE_OFTEN:
            causes = Counter(incident.cause for incident in case.past if node in incident.nodes)
            yield Claim(
                cause=cause_of(causes.most_common(1)[0][0]), kind="repeat_offender",
                says=f"{node} was the culprit of {count} recent incidents", strength=0.4,
                nodes=(node,),
            )  # fmt: skip


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
