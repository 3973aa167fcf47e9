"""What is weighed of a case: nothing of nodes that had no seat in its job (A11.1)."""

from typing import Any

from msgspec.structs import replace

from everstep.messages import (
    Case,
    EvidencePiece,
    Member,
    NodeSign,
    OutsideAct,
    RoundDocument,
    SaveFailure,
    SlowRankSign,
    Stall,
)
from everstep_services.attribution.domain.combiner import combine
from everstep_services.attribution.domain.seated import left_out, naming_only, seated
from tests.unit.attribution.cases import NOON, case, claim, end
from tests.unit.rendezvous.documents import seated as round_of

OURS, VICTIM = "n1", "victim"


def with_all(node: str) -> Case:
    """The case, with everything that a job's login can say of a node."""
    told: dict[str, Any] = {
        "node": node,
        "ends": (end(3, node=node),),
        "stalls": (
            Stall(rank=3, node=node, fact="s", round=1, phase="step", waited_s=5, limit_s=4),
        ),
        "nodes": (NodeSign(node=node, sign="lost", reason="silent", fact="l", at=NOON),),
        "outside": (OutsideAct(act="preempted", by="slurm", reason="", fact="o", node=node),),
        "saves": (SaveFailure(fact="w", stage="write", reason="", node=node),),
        "slow": (SlowRankSign(rank=3, node=node, cause="host", reason="", fact="r"),),
        "evidence": (EvidencePiece(evidence="kernel_log", node=node, fact="e"),),
    }
    return replace(case(), **told)


def document(*nodes: str, round_: int = 1, former: tuple[str, ...] = ()) -> RoundDocument:
    return round_of("j", nodes, ranks=2, round_=round_, former=former)


def test_what_is_said_of_nodes_without_a_seat_is_left_out_and_counted() -> None:
    told = with_all(VICTIM)
    weighed = seated(told, document("n0", "n1"))
    assert weighed == case()
    assert left_out(told, weighed) == 7


def test_what_is_said_of_the_jobs_own_nodes_is_weighed_also_when_the_job_is_over() -> None:
    told = with_all(OURS)
    for of in (document("n0", OURS), document(former=("n0", OURS), round_=9)):
        assert seated(told, of) == told
        assert left_out(told, told) == 0


def test_members_are_those_of_rendezvous_and_of_another_round_only_its_nodes() -> None:
    """`round_formed` may be forged."""
    forged = (Member(slot=0, node=VICTIM, first_rank=0, ranks=2), *case().members[1:])
    told = replace(case(), round=2, members=forged, world_size=9)
    known = seated(told, document("n0", "n1", round_=2))
    assert (known.members, known.world_size) == (case().members, 4)
    later = seated(told, document("n0", "n1", round_=3))
    assert [member.node for member in later.members] == ["n1"]


def test_of_a_job_that_rendezvous_does_not_know_no_node_is_named() -> None:
    told = with_all(VICTIM)
    weighed = seated(told, None)
    assert (weighed.members, weighed.ends) == ((), told.ends)
    assert [one.nodes for one in naming_only([claim("gpu", nodes=(VICTIM,))], None)] == [()]


def test_whatever_an_analyzer_claims_no_other_node_is_named() -> None:
    claims = [
        claim("gpu", nodes=(VICTIM, OURS), says="Xid 79"),
        claim("gpu", nodes=(VICTIM,), is_against=True, analyzer="another"),
        claim("host", 7.0, analyzer="unsound"),
    ]
    named = list(naming_only(claims, document("n0", OURS)))
    assert [one.nodes for one in named] == [(OURS,), ()], "who runs well elsewhere says nothing"
    judged = combine(case(), named, ())
    assert (judged.cause, judged.nodes) == ("gpu", (OURS,))
    assert "unsound" in judged.missing[0]
