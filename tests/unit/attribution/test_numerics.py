"""Judgements of results that cannot be right become claims and verdicts."""

from datetime import timedelta
from typing import Any

import pytest

from everstep.messages import (
    CasesDocument,
    ErrorRecord,
    IncidentClosed,
    IncidentOpened,
    Ledger,
    NumericsJudged,
    OutsideAct,
)
from everstep_services.attribution.domain.case_facts import JobCases
from tests.unit.attribution.cases import NOON, about, case, exited, formed, lost_peer, raised
from tests.unit.attribution.evidence import judged

LEFT = tuple(raised(rank, "SystemExit", "17", exit_code=17, asks="stop") for rank in range(4))


def result(kind: str, **fields: Any) -> NumericsJudged:
    values: dict[str, Any] = {
        "id": "j1", "case": "0123456789abcdef", "step": 41, "signal": "loss_spike", "kind": kind,
        "reason": "rank 3 has loss 9.5, again 9.5 and 9.5, elsewhere 2.25", "ranks": (3,),
        "node": "n1", "device": "GPU-5", "group": "layers.7", "incident": "i",
    }  # fmt: skip
    return NumericsJudged(**{**about(), **values, **fields})


async def verdict(kind: str, **fields: Any) -> Any:
    return await judged(case(trigger="numerics", results=(result(kind, **fields),)), {})


async def test_a_gpu_that_computes_wrongly_each_time_is_to_be_left_out() -> None:
    found = await verdict("persistent")
    assert (found.cause, found.kind, found.ranks, found.nodes) == (
        "gpu", "silent_corruption", (3,), ("n1",),
    )  # fmt: skip
    assert (found.retry, found.advice, found.is_transient) == (
        "without_node", "restart_without", False,
    )  # fmt: skip
    assert found.reason == (
        "step 41: rank 3 has loss 9.5, again 9.5 and 9.5, elsewhere 2.25; layers.7 is the first "
        "group that differs"
    )
    assert found.confidence > 0.8
    assert (await verdict("persistent", device="")).cause == "host"


async def test_a_result_that_did_not_come_again_needs_no_restart() -> None:
    found = await verdict("transient")
    assert (found.cause, found.kind, found.nodes) == ("gpu", "silent_corruption", ("n1",))
    assert (found.retry, found.advice, found.is_transient) == ("as_is", "restart", True)


async def test_a_result_that_comes_everywhere_is_of_its_data() -> None:
    found = await verdict("correct_but_unexpected", samples_from=4096, samples_to=4160, node="")
    assert (found.cause, found.nodes, found.retry) == ("data", (), "after_change")
    assert found.reason.endswith("with data 4096 to 4159")
    found = await verdict("correct_but_unexpected", node="")
    assert (found.cause, found.nodes) == ("user_code", ())


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("not_reproducible_and_not_local", {"ranks": (), "node": ""}),
        ("replica_differs", {"ranks": (1, 3), "node": "n0"}),  # of two replicas, nobody is odd
        ("replica_differs", {"ranks": (2, 3), "node": "n1"}),  # nor if both are on a node
        ("a kind of a newer release", {}),
    ],
)
async def test_what_names_no_device_blames_none(kind: str, fields: dict[str, Any]) -> None:
    found = await verdict(kind, **fields)
    assert (found.cause, found.nodes) == ("unknown", ())
    assert found.confidence < 0.7


async def test_the_replica_that_differs_from_all_others_is_named() -> None:
    found = await verdict("replica_differs", signal="replicas_differ")
    assert (found.cause, found.ranks, found.nodes) == ("gpu", (3,), ("n1",))
    assert found.retry == "without_node"


async def test_one_of_several_nodes_is_not_accused() -> None:
    found = await verdict("persistent", ranks=(1, 3), node="n0")
    assert (found.cause, found.ranks, found.nodes) == ("gpu", (1, 3), ())
    assert found.advice == "restart_elsewhere"


async def test_a_suspicion_without_a_judgement_is_inconclusive_and_tells_the_values() -> None:
    reason = "at step 41 the loss or the gradient norm is not a number on rank 2"
    found = await judged(case(trigger="numerics", rank=2, reason=reason), {})
    assert found.is_inconclusive
    assert reason in found.reason


async def test_the_exits_that_followed_are_no_failures_of_their_own() -> None:
    of = case(trigger="numerics", ends=(*LEFT[:3], lost_peer(3)), results=(result("persistent"),))
    found = await judged(of, {})
    assert (found.cause, found.ranks, found.nodes) == ("gpu", (3,), ("n1",))
    assert "exited with 17" not in found.reason


async def test_exits_without_a_judgement_tell_what_was_asked_for() -> None:
    found = await judged(case(trigger="numerics", ends=LEFT[:1]), {})
    assert found.kind == "result_rejected"
    assert "exited with 17: it rejected a result" in found.reason


def opened(incident: str, source: str, **fields: Any) -> IncidentOpened:
    given = {**about(), "source": source, "trigger": "numerics", "reason": "r", **fields}
    return IncidentOpened(**given, id=f"opened-{incident}", incident=incident)


def test_the_round_that_ended_because_of_a_result_has_its_judgement() -> None:
    cases = JobCases("j", CasesDocument())
    cases.take(formed())
    for number, kind in enumerate(("transient", "persistent")):
        cases.take(opened(f"i{number}", "agent/n0"))
        cases.take(result(kind, id=f"j{number}", incident=f"i{number}"))
        cases.take(result(kind, id=f"j{number}", incident=f"i{number}"))
    error = ErrorRecord(name="SystemExit", text="17", asks="stop")
    cases.take(exited(3, exit_code=17, error=error))
    cases.take(opened("i2", "rendezvous"))
    assert [[it.kind for it in case.results] for case in cases.cases] == [
        ["transient"], ["persistent"], ["persistent"],
    ]  # fmt: skip
    of_round = cases.case("i2")
    assert of_round is not None
    assert [end.asks for end in of_round.ends] == ["stop"]


@pytest.mark.parametrize(
    ("fault", "fields", "cause"),
    [
        ("flip_gradient", {"kind": "persistent"}, "injected"),
        ("flip_reduced_gradient", {"kind": "replica_differs"}, "injected"),
        ("poison_batch", {"kind": "correct_but_unexpected", "ranks": (0,)}, "injected"),
        ("flip_gradient", {"kind": "persistent", "ranks": (2,)}, "gpu"),
    ],
)
async def test_a_result_of_a_fault_on_purpose_blames_nobody(
    fault: str, fields: dict[str, Any], cause: str
) -> None:
    long_before = NOON - timedelta(minutes=9)
    act = OutsideAct(
        act="injected", by="ann", reason=fault, fact="f", at=long_before, node="n1", rank=3
    )
    found = await judged(case(trigger="numerics", results=(result(**fields),), outside=(act,)), {})
    assert found.cause == cause
    assert bool(found.nodes) == (cause != "injected")


async def test_what_ranks_compute_after_a_move_is_about_the_round_that_they_left() -> None:
    """Also if that incident is over: the first step of the next round may be reported sooner."""
    cases = JobCases("j", CasesDocument())
    cases.take(formed())
    cases.take(opened("i1", "agent/n0"))
    cases.take(result("correct_but_unexpected", incident="i1"))
    cases.take(opened("i2", "rendezvous"))
    cases.take(formed(round_=2))
    end: dict[str, Any] = {"outcome": "recovered", "reason": "r", "ledger": Ledger()}
    cases.take(IncidentClosed(**about(), id="closed", incident="i2", **end))
    moved = result("persistent", id="j2", incident="i1", round=2, moved_from=1, ranks=(2, 3))
    assert cases.take(moved) == "i2", "judge it again"
    assert cases.take(moved) is None
    left = cases.case("i2")
    assert left is not None
    assert [it.kind for it in left.results] == ["persistent"]
    found = await judged(left, {})
    assert (found.cause, found.ranks, found.nodes) == ("gpu", (2, 3), ("n1",))
    cases.take(opened("i3", "rendezvous", round=2, trigger="rank_exited"))
    assert [it.incident for it in cases.cases if it.round == 2 and it.results] == []


@pytest.mark.parametrize("round_", [1, 2])
def test_the_judgement_may_come_after_the_end_of_its_round(round_: int) -> None:
    """An agent's facts may be late; and ranks that have moved judge their result in the next."""
    cases = JobCases("j", CasesDocument())
    cases.take(formed())
    cases.take(opened("i2", "rendezvous"))
    cases.take(formed(round_=2))
    cases.take(opened("i1", "agent/n0", round=round_))
    assert cases.take(result("persistent", incident="i1", round=round_)) == "i2", "judge it again"
    assert [[it.kind for it in case.results] for case in cases.cases] == [["persistent"]] * 2
