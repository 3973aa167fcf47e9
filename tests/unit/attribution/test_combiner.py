"""Claims become one verdict: the right culprits, no innocent node, no cascade as a root."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages import CorrectVerdict
from everstep.verdict_causes import (
    NODE_CAUSES,
    VERDICT_CAUSES,
    Advice,
    VerdictCause,
    advice_text,
    retry_of,
)
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.domain.combiner import combine
from everstep_services.attribution.domain.verdicts import unknown_culprits
from everstep_services.attribution.domain.weights import shipped
from tests.unit.attribution.cases import case, claim


def test_without_claims_it_is_inconclusive_and_says_what_is_missing() -> None:
    judged = combine(case(), [], ["stacks of n0: ptrace is not allowed"])
    assert judged.is_inconclusive
    assert (judged.cause, judged.confidence, judged.ranks) == ("unknown", 0.0, ())
    assert judged.missing == ("stacks of n0: ptrace is not allowed",)


def test_a_weak_claim_alone_is_inconclusive_and_still_named() -> None:
    judged = combine(case(), [claim("data", 0.3, ranks=(3,))], [])
    assert judged.is_inconclusive
    assert judged.confidence < shipped().confidence.least
    assert [(one.cause, one.ranks) for one in judged.others] == [("data", (3,))]


def test_analyzers_that_agree_are_surer_than_one_that_repeats_itself() -> None:
    one = claim("user_code", 0.6, ranks=(3,))
    alone = combine(case(), [one], []).confidence
    assert combine(case(), [one, one, one], []).confidence == alone
    logs = claim("user_code", 0.6, ranks=(3,), analyzer="logs")
    assert combine(case(), [one, logs], []).confidence > alone


def test_two_explanations_that_are_as_likely_leave_it_open() -> None:
    judged = combine(case(), [claim("data", 0.5, ranks=(1,)), claim("gpu", 0.5, ranks=(2,))], [])
    assert judged.is_inconclusive
    assert {one.cause for one in judged.others} == {"data", "gpu"}
    assert "as much evidence for" in judged.reason


def test_what_a_node_did_at_other_times_is_no_reason_for_doubt() -> None:
    """A job on a node that has failed often is judged by its own evidence."""
    stall = claim("data", 0.6, analyzer="stalls", ranks=(1,))
    suspected = claim("host", 0.3, kind="suspected", analyzer="health", nodes=("n0",))
    offender = claim("host", 0.4, kind="repeat_offender", analyzer="history", nodes=("n0",))
    alone, known = combine(case(), [stall], []), combine(case(), [stall, suspected, offender], [])
    assert (known.ranks, known.confidence) == (alone.ranks, alone.confidence) == ((1,), 0.61)
    assert {other.cause for other in known.others} == {"host"}
    assert combine(case(), [suspected, offender], []).is_inconclusive


def test_a_weak_claim_names_no_rank_where_the_strongest_leaves_it_open() -> None:
    """A rank that is ending was only elsewhere at that moment."""
    open_claim = claim("user_code", 0.95, kind="size_mismatch", analyzer="logs")
    weak = claim("user_code", 0.2, kind="in_exit", ranks=(5,), analyzer="stacks")
    place = claim("unknown", 0.3, kind="elsewhere", role="place", ranks=(5,), analyzer="stacks")
    judged = combine(case(), [open_claim, weak, place], [])
    assert (judged.cause, judged.ranks) == ("user_code", ())
    strong = claim("unknown", 0.9, kind="never_joined", role="place", ranks=(3,))
    assert combine(case(), [open_claim, strong], []).ranks == (3,)


def test_a_rank_that_only_lost_its_peer_is_never_the_root() -> None:
    claims = [
        claim("unknown", 0.9, kind="lost_peer", role="consequence", ranks=(0, 1, 2)),
        claim("network", 0.6, ranks=(0, 1, 2), analyzer="logs"),
        claim("user_code", 0.6, ranks=(3,)),
    ]
    judged = combine(case(), claims, [])
    assert (judged.cause, judged.ranks) == ("user_code", (3,))
    assert "3 ranks (0, 1, 2) failed only because of that" in judged.reason


def test_a_place_decides_between_causes_and_gives_a_cause_its_ranks() -> None:
    never_joined = claim("unknown", 0.9, role="place", ranks=(3,), analyzer="flight_recorder")
    here = claim("data", 0.5, ranks=(3,), analyzer="stacks")
    there = claim("storage", 0.5, ranks=(1,), analyzer="stacks")
    judged = combine(case(), [never_joined, there, here], [])
    assert (judged.cause, judged.ranks, judged.is_inconclusive) == ("data", (3,), False)
    judged = combine(case(), [never_joined, claim("scheduler", 0.8)], [])
    assert (judged.cause, judged.ranks) == ("scheduler", (3,))


def test_a_weak_claim_adds_no_culprits_to_those_of_a_strong_one() -> None:
    """One rank has raised; at that moment others were not in the collective, either."""
    raised = claim("user_code", 0.85, ranks=(3,))
    elsewhere = claim("user_code", 0.6, ranks=(0, 2, 3), analyzer="flight_recorder")
    assert combine(case(), [raised, elsewhere], []).ranks == (3,)
    assert combine(case(), [elsewhere], []).ranks == (0, 2, 3)


def test_ranks_that_were_interrupted_with_their_job_are_no_culprits() -> None:
    interrupt = claim("scheduler", 0.97, kind="operator")
    raised = claim("scheduler", 0.8, kind="operator", ranks=(0, 1, 2, 3))
    judged = combine(case(), [interrupt, raised], [])
    assert (judged.cause, judged.ranks, judged.is_inconclusive) == ("scheduler", (), False)
    assert combine(case(), [raised], []).ranks == (0, 1, 2, 3)


def test_an_unknown_cause_of_another_kind_supports_nothing() -> None:
    """A crash of some process in a kernel's log is no sign that a rank was killed."""
    killed = claim("unknown", 0.75, kind="killed", ranks=(1,))
    crash = claim("unknown", 0.3, kind="segfault", analyzer="logs")
    judged = combine(case(), [killed, crash], [])
    assert judged.confidence <= combine(case(), [killed], []).confidence
    assert [item.kind for item, weight in judged.evidence if weight] == ["killed"]
    gone = claim("unknown", 0.6, kind="no_dump", role="place", ranks=(1,), says="it left no dump")
    assert "also" not in combine(case(), [killed, crash, gone], []).reason


def test_where_ranks_stand_that_end_because_of_others_is_no_place() -> None:
    lost = claim("unknown", 0.9, kind="lost_peer", role="consequence", ranks=(1, 2))
    mismatch = claim("user_code", 0.8, ranks=(0,), analyzer="flight_recorder")
    ending = claim("unknown", 0.9, role="place", ranks=(2,), analyzer="stacks")
    judged = combine(case(), [mismatch, lost, ending], [])
    assert (judged.cause, judged.ranks, judged.is_inconclusive) == ("user_code", (0,), False)
    other = claim("unknown", 0.9, role="place", ranks=(3,), analyzer="stacks")
    assert combine(case(), [mismatch, lost, other], []).is_inconclusive


def test_who_was_killed_is_named_and_a_stronger_claim_says_by_what() -> None:
    """A claim without a cause does not rival a claim that has the cause of the same rank."""
    killed = claim("unknown", 0.75, kind="killed", ranks=(3,))
    judged = combine(case(), [killed], [])
    assert (judged.cause, judged.ranks, judged.is_inconclusive) == ("unknown", (3,), False)
    memory = claim("host", 0.9, ranks=(3,), analyzer="node_state")
    judged = combine(case(), [killed, memory], [])
    assert (judged.cause, judged.ranks, judged.others) == ("host", (3,), ())
    weak = claim("user_code", 0.5, ranks=(3,), analyzer="logs")
    assert combine(case(), [killed, weak], []).cause == "unknown"


def test_what_speaks_against_a_cause_takes_it_back() -> None:
    lost = claim("host", 0.85, nodes=("n1",))
    runs = claim("host", 0.9, nodes=("n1",), is_against=True)
    assert combine(case(), [lost], []).nodes == ("n1",)
    judged = combine(case(), [lost, runs, claim("network", 0.8)], [])
    assert (judged.cause, judged.nodes) == ("network", ())


@pytest.mark.parametrize("analyzer", ["history", "stragglers"])
def test_other_times_alone_name_no_node(analyzer: str) -> None:
    judged = combine(case(), [claim("host", 1.0, nodes=("n1",), analyzer=analyzer)] * 2, [])
    assert judged.nodes == ()


ADVICE: list[tuple[Claim, str]] = [
    (claim("user_code", is_transient=False), "change"),
    (claim("gpu", nodes=("n1",)), "restart_without"),
    (claim("gpu"), "restart"),
    (claim("host", nodes=("n1",), is_transient=True), "restart"),
    (claim("storage", is_transient=False), "inform"),
    (claim("scheduler", kind="preempted"), "wait"),
    (claim("scheduler", kind="operator"), "stop"),
    (claim("framework"), "restart"),
]


@pytest.mark.parametrize(("one", "advice"), ADVICE)
def test_advice_follows_from_the_cause(one: Claim, advice: str) -> None:
    assert combine(case(), [one], []).advice == advice


def test_a_second_failure_of_a_culprit_is_no_rival() -> None:
    """A7.2: two ranks fail at once, each by an error of its own; the recorders name both."""
    both = claim("unknown", 0.95, role="place", ranks=(0, 2), analyzer="flight_recorder")
    joined = claim("user_code", 0.3, ranks=(0, 2), analyzer="flight_recorder", kind="never_joined")
    one = claim("user_code", 0.85, ranks=(2,), says="rank 2 raised TypeError", fingerprint="t")
    other = claim("user_code", 0.85, ranks=(0,), says="rank 0 raised KeyError", fingerprint="k")
    found = combine(case(), [one, both, joined, other], [])
    assert (found.cause, found.ranks, found.others) == ("user_code", (0, 2), ())
    assert "rank 2 raised TypeError" in found.reason
    assert "rank 0 raised KeyError" in found.reason


def test_the_same_failure_without_a_step_in_between_is_to_be_stopped() -> None:
    first = claim("user_code", ranks=(3,), fingerprint="observed:ValueError")
    again = claim(
        "unknown", 0.8, kind="same_failure", analyzer="history", ranks=(3,),
        fingerprint="observed:ValueError", is_transient=False,
    )  # fmt: skip
    judged = combine(case(), [again, first], [])
    assert (judged.cause, judged.advice, judged.is_transient) == ("user_code", "stop", False)
    assert judged.fingerprint == "observed:ValueError"


def test_claims_that_make_no_sense_are_left_out_and_named() -> None:
    bad = claim("gpu", 7.0, analyzer="mine")
    judged = combine(case(), [bad, claim("user_code", ranks=(3,))], [])
    assert judged.cause == "user_code"
    assert any(text.startswith("mine:") for text in judged.missing)


CLAIMS = st.builds(
    Claim,
    cause=st.sampled_from(VERDICT_CAUSES),
    kind=st.sampled_from(["a", "b"]),
    says=st.just("it was so"),
    strength=st.floats(0, 1),
    role=st.sampled_from(["root", "place", "consequence"]),
    is_against=st.booleans(),
    ranks=st.sets(st.integers(0, 3), max_size=3).map(tuple),
    nodes=st.sets(st.sampled_from(["n0", "n1"])).map(tuple),
    is_transient=st.sampled_from([None, True, False]),
    fingerprint=st.sampled_from(["", "f"]),
    analyzer=st.sampled_from(["ends", "logs", "health", "history", "mine"]),
)


@given(st.lists(CLAIMS, max_size=12))
def test_whatever_is_claimed_no_node_is_named_without_evidence_of_it(claims: list[Claim]) -> None:
    judged = combine(case(), claims, [])
    assert 0.0 <= judged.confidence <= 0.99
    assert judged.is_inconclusive == (judged.confidence < shipped().confidence.least)
    if judged.nodes:
        assert judged.cause in NODE_CAUSES
    for node in judged.nodes:
        assert any(
            node in one.nodes and one.cause == judged.cause and not one.is_against
            and one.role == "root" and one.strength >= 0.5 and one.analyzer != "history"
            for one in claims
        )  # fmt: skip
    rooted = {rank for one in claims for rank in one.ranks if one.role != "consequence"}
    assert set(judged.ranks) <= rooted


@given(
    st.permutations(
        [claim("data", 0.7, ranks=(1,)), claim("gpu", 0.6, ranks=(2,)), claim("host", 0.4)]
    )
)
def test_the_order_of_claims_does_not_matter(claims: list[Claim]) -> None:
    judged = combine(case(), claims, [])
    assert judged.cause == "data"
    assert judged == combine(case(), sorted(claims, key=lambda one: one.cause), [])


def test_every_cause_is_known_to_the_weights_and_every_number_is_sane() -> None:
    numbers = shipped()
    assert 0 < numbers.confidence.least < numbers.confidence.most < 1
    assert all(0 <= value <= 1 for value in (*numbers.analyzers.values(), *numbers.kinds.values()))
    known: set[VerdictCause] = set(VERDICT_CAUSES)
    assert known >= NODE_CAUSES


@pytest.mark.parametrize(
    ("ranks", "nodes", "problem"),
    [
        ((3,), ("n1",), ""),
        ((4,), (), "there is no rank 4: the round had ranks 0 to 3"),
        ((), ("moon",), "this incident has no node 'moon': its nodes are n0, n1"),
    ],
)
def test_a_correction_names_ranks_and_nodes_of_the_incident(
    ranks: tuple[int, ...], nodes: tuple[str, ...], problem: str
) -> None:
    """A11.1: what a person says counts for the node in later verdicts."""
    ask = CorrectVerdict(
        job="j", incident="i", by="ann", cause="host", reason="", culprit_ranks=ranks,
        culprit_nodes=nodes,
    )  # fmt: skip
    assert unknown_culprits(case(), ask) == problem


@pytest.mark.parametrize("advice", get_args(Advice))
def test_every_advice_says_more_than_its_name(advice: str) -> None:
    assert len(advice_text(advice, "user_code")) > len(advice)


def test_an_end_that_somebody_requested_does_not_come_again() -> None:
    assert advice_text("stop", "scheduler") == "stop: somebody requested its end"
    assert advice_text("ask the vendor", "gpu") == "ask the vendor", "from a newer release"


@pytest.mark.parametrize("advice", get_args(Advice))
@pytest.mark.parametrize("cause", ["user_code", "scheduler"])
def test_what_a_training_that_is_back_does_not_need_is_not_advised(advice: str, cause: str) -> None:
    """A spare took over: nobody needs to wait for nodes."""
    text = advice_text(advice, cause, "recovered")
    assert text.endswith("the training goes on")
    assert text != advice_text(advice, cause, "preempted")


def test_advice_and_retry_tell_the_same() -> None:
    """Of a bug, a full disk or a host out of memory, no text says that the same run may succeed."""
    claims = [
        claim("user_code", kind="hang"), claim("storage", kind="disk_full"),
        claim("host", kind="host_oom", nodes=("n1",)), claim("gpu", kind="gpu_ecc"),
    ]  # fmt: skip
    for one in claims:
        judged = combine(case(), [one], [])
        text = advice_text(judged.advice, judged.cause)
        assert judged.advice in {"change", "restart_elsewhere"}, "REST says what the console says"
        assert "same run" not in text
        assert "nodes named above" not in text
    assert "same run" in advice_text("restart", "injected")


@pytest.mark.parametrize(
    ("cause", "kind", "nodes", "is_transient", "retry"),
    [
        ("user_code", "python_exception", (), None, "after_change"),
        ("user_code", "gpu_oom", (), None, "after_change"),
        ("user_code", "python_exception", (), True, "as_is"),
        ("host", "host_oom", ("n1",), None, "after_change"),
        ("gpu", "gpu_ecc", (), None, "without_node"),
        ("network", "link", ("n1",), None, "without_node"),
        ("network", "network", (), None, "as_is"),
        ("storage", "disk_full", (), None, "after_change"),
        ("storage", "storage", (), False, "after_change"),
        ("scheduler", "preempted", (), None, "as_is"),
        ("scheduler", "operator", (), None, "never"),
        ("injected", "kill", (), True, "as_is"),
        ("framework", "crash", (), None, "unknown"),
        ("unknown", "killed", (), None, "unknown"),
    ],
)
def test_whether_another_attempt_may_succeed(
    cause: VerdictCause, kind: str, nodes: tuple[str, ...], is_transient: bool | None, retry: str
) -> None:
    assert retry_of(cause, kind, has_nodes=bool(nodes), is_transient=is_transient) == retry
    one = claim(cause, 0.9, kind=kind, nodes=nodes, is_transient=is_transient)
    assert combine(case(), [one], []).retry == retry


def test_nobody_knows_whether_a_retry_helps_where_the_cause_is_open() -> None:
    assert combine(case(), [claim("host", 0.2, kind="host_oom")], []).retry == "unknown"
