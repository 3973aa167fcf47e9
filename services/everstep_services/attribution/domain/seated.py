"""Keeps only the evidence about nodes that, according to rendezvous, train for the job.

A job's login may put evidence, ends and signs of any node on record, and name any as a member of a
round. The members are those of rendezvous' document while it is of the case's round. Of another
round they are what `round_formed` says, without nodes that never had a seat in the job; rendezvous
remembers who had, also when the job is over. Of a job that rendezvous does not know, as one of
another launcher, no verdict names a node.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol, TypeVar

from msgspec.structs import replace

from everstep.messages import Case, Member, RoundDocument
from everstep_services.attribution.domain.claims import Claim, is_sound


class _OfNode(Protocol):
    @property
    def node(self) -> str | None: ...


P = TypeVar("P", bound=_OfNode)


def seated(case: Case, document: RoundDocument | None) -> Case:
    """Return the case without evidence about nodes that had no seat in its job."""
    if document is None:
        return replace(case, members=())
    nodes = document.nodes
    members, world_size = _round_of(case, document, nodes)
    return replace(
        case,
        members=members,
        world_size=world_size,
        node=case.node if case.node in nodes else None,
        ends=_of(nodes, case.ends),
        done=_of(nodes, case.done),
        stalls=_of(nodes, case.stalls),
        warned_stalls=_of(nodes, case.warned_stalls),
        nodes=_of(nodes, case.nodes),
        outside=_of(nodes, case.outside),
        saves=_of(nodes, case.saves),
        slow=_of(nodes, case.slow),
        evidence=_of(nodes, case.evidence),
    )


def left_out(case: Case, seated_case: Case) -> int:
    """How many parts of a case are not weighed."""
    return _parts(case) - _parts(seated_case)


def naming_only(claims: Iterable[Claim], document: RoundDocument | None) -> Iterator[Claim]:
    """The claims, which name no other nodes: analyzers may come from anybody."""
    nodes = frozenset[str]() if document is None else document.nodes
    for claim in claims:
        if not is_sound(claim):
            yield claim  # the combiner leaves it out, and reports that
            continue
        named = tuple(node for node in claim.nodes if node in nodes)
        if named or not claim.nodes or not claim.is_against:
            yield replace(claim, nodes=named)


def _round_of(
    case: Case, document: RoundDocument, nodes: Collection[str]
) -> tuple[tuple[Member, ...], int]:
    if document.round == case.round and document.members:
        return document.members, document.world_size
    return _of(nodes, case.members), case.world_size


def _of(nodes: Collection[str], parts: Iterable[P]) -> tuple[P, ...]:
    return tuple(part for part in parts if part.node is None or part.node in nodes)


def _parts(case: Case) -> int:
    of_nodes = (
        case.ends,
        case.done,
        case.stalls,
        case.warned_stalls,
        case.nodes,
        case.outside,
        case.saves,
        case.slow,
    )
    return sum(map(len, of_nodes)) + len(case.evidence)
