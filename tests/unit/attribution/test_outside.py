"""What was done on purpose is told as that: injected faults, and what people asked for."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import FaultInjected, NodeLeft, NodeLost, OperatorActed, OutsideAct, RankEnd
from everstep_services.attribution.domain.event_order import in_time
from tests.unit.attribution.cases import (
    NOON,
    about,
    case,
    end,
    error,
    exited,
    formed,
    lost_peer,
    opened,
    raised,
)
from tests.unit.attribution.test_case_facts import cases_of
from tests.unit.attribution.test_ends import judged

KILLED = end(3, how="signal", exit_code=None, signal="SIGKILL")


def injected(fault: str = "kill", at_s: float = -4.0, **more: Any) -> FaultInjected:
    given = {**about(id="inject"), "at": NOON + timedelta(seconds=at_s)}
    return FaultInjected(**given, fault=fault, by="ann", **{"node": "n1", "rank": 3, **more})


def act(fault: str, at_s: float, **more: Any) -> OutsideAct:
    given = {"node": "n1", "rank": 3, **more}
    at = NOON + timedelta(seconds=at_s)
    return OutsideAct(act="injected", by="ann", reason=fault, fact="inject", at=at, **given)


async def test_a_kill_that_was_injected_is_told_as_that() -> None:
    """On record 4 s before: the rank, who did it, and that nothing is broken."""
    killed = exited(3, how="signal", exit_code=None, signal="SIGKILL")
    peer = exited(0, error=error("RuntimeError", "Connection closed by peer [10.0.0.3]:4711"))
    found_case = cases_of(formed(), injected(), killed, peer, opened()).case("i")
    assert found_case is not None
    found = await judged(in_time(found_case))
    assert (found.cause, found.kind, found.ranks, found.nodes) == ("injected", "kill", (3,), ())
    assert found.reason.startswith("injected by ann: SIGKILL of rank 3 (n1)")
    assert found.confidence > 0.9
    assert (found.advice, found.is_transient) == ("restart", True)
    assert not found.others, "a kill that nobody sent is no other explanation"
    assert not any("no evidence shows" in claim.says for claim, _ in found.evidence)


@pytest.mark.parametrize(
    ("fault", "at_s", "one", "lasts_s"),
    [
        ("exception", -60.0, raised(3, "InjectedError", "injected"), None),
        ("exit", -0.1, end(3, exit_code=1), None),
        ("memory_leak", -20.0, end(3, how="out_of_memory", exit_code=None, signal="SIGKILL"), 30.0),
        ("segfault", 0.4, end(3, how="signal", exit_code=None, signal="SIGSEGV"), None),
    ],
)
async def test_each_fault_explains_what_it_brings_about(
    fault: str, at_s: float, one: RankEnd, lasts_s: float | None
) -> None:
    acts = (act(fault, at_s, lasts_s=lasts_s),)
    found = await judged(in_time(case(ends=(lost_peer(0), one), outside=acts)))
    assert (found.cause, found.kind, found.ranks) == ("injected", fault, (3,))


@pytest.mark.parametrize(
    ("fault", "at_s", "reason", "error_name", "cause"),
    [
        ("exception", -60.0, "rank 3 failed", "InjectedError", "injected"),
        ("hang", -60.0, "rank 3 made no progress for 60 s", "", "injected"),
        ("kill", -60.0, "rank 3 raised ValueError: no InjectedError", "ValueError", "user_code"),
    ],
)
async def test_a_restart_in_the_processes_may_be_injected_too(
    fault: str, at_s: float, reason: str, error_name: str, cause: str
) -> None:
    of = case(
        trigger="restarted_in_process", rank=3, reason=reason, error_name=error_name,
        outside=(act(fault, at_s),),
    )  # fmt: skip
    found = await judged(in_time(of))
    assert (found.cause, found.ranks) == (cause, (3,))


@pytest.mark.parametrize(
    "of",
    [
        case(
            ends=(raised(3, "ValueError", "bad batch"),), outside=(act("slow", -99, lasts_s=9.0),)
        ),
        case(ends=(raised(1, "ValueError", "bad batch"),), outside=(act("kill", -1.0),)),
        case(ends=(raised(3, "ValueError", "bad batch"),), outside=(act("kill", 60.0),)),
        case(ends=(raised(3, "ValueError", "bad batch"),), outside=(act("terminate", -99),)),
    ],
)
async def test_a_fault_of_another_time_or_rank_explains_nothing(of: Any) -> None:
    found = await judged(in_time(of))
    assert (found.cause, found.kind) == ("user_code", "python_exception")


async def test_a_node_that_is_cut_off_on_purpose_is_no_broken_host() -> None:
    lost = NodeLost(
        **{**about(id="lost"), "at": NOON}, node="n1", silence_s=9.0, limit_s=8.0, reason="silent"
    )
    fact = injected("cut_off", -10.0, rank=None, lasts_s=30.0)
    given: dict[str, Any] = {"trigger": "node_lost", "node": "n1", "trigger_fact": "lost"}
    found_case = cases_of(formed(), fact, lost, opened(**given)).case("i")
    assert found_case is not None
    found = await judged(in_time(found_case))
    assert (found.cause, found.kind, found.nodes) == ("injected", "cut_off", ())
    assert "injected by ann: cut_off of n1" in found.reason


async def test_all_faults_that_were_injected_at_once_are_named() -> None:
    acts = tuple(act("partition", -1.0, node=node, rank=None) for node in ("n0", "n1"))
    ends = (lost_peer(0), lost_peer(2), end(3, how="unknown", exit_code=None))
    found = await judged(in_time(case(ends=ends, outside=acts)))
    assert (found.cause, found.ranks, found.others) == ("injected", (0, 1, 2, 3), ())
    assert "partition of n0" in found.reason
    assert "partition of n1" in found.reason
    kills = (act("kill", -1.0), act("kill", -1.0, node="n0", rank=0))
    ends = (KILLED, replace(KILLED, rank=0, node="n0"), lost_peer(1))
    found = await judged(in_time(case(ends=ends, outside=kills)))
    assert (found.cause, found.ranks, found.others) == ("injected", (0, 3), ())


@pytest.mark.parametrize("action", ["stop_job", "drain_node", "restart_job", "interrupt"])
async def test_ends_after_a_persons_request_are_told_as_ordered(action: str) -> None:
    """Its ranks end as they like: by the signal, or by the exception that Python makes of it."""
    target = "n1" if action in {"drain_node", "interrupt"} else ""
    asked = OperatorActed(
        **{**about(id="asked"), "at": NOON - timedelta(seconds=1)}, by="ann", action=action,
        target=target, outcome="accepted", reason="enough", origin="rest",
    )  # fmt: skip
    ended = exited(3, error=error("KeyboardInterrupt", ""))
    found_case = cases_of(formed(), asked, ended, opened()).case("i")
    assert found_case is not None
    found = await judged(in_time(found_case))
    assert (found.cause, found.kind, found.nodes) == ("scheduler", "operator", ())
    assert found.confidence > 0.8


@pytest.mark.parametrize("action", ["stop_job", "drain_node", "restart_job"])
async def test_a_failure_while_ranks_save_for_an_order_is_not_put_down_to_the_person(
    action: str,
) -> None:
    """An order lets ranks save, and signals none before their round is over."""
    asked = OperatorActed(
        **{**about(id="asked"), "at": NOON - timedelta(seconds=1)}, by="ann", action=action,
        target="n0" if action == "drain_node" else "", outcome="accepted", reason="enough",
    )  # fmt: skip
    peer = exited(0, error=error("RuntimeError", "Connection closed by peer [10.0.0.3]:4711"))
    for signal, kind in (("SIGKILL", "killed"), ("SIGSEGV", "segfault")):
        killed = exited(3, how="signal", exit_code=None, signal=signal)
        found_case = cases_of(formed(), asked, killed, peer, opened()).case("i")
        assert found_case is not None
        found = await judged(in_time(found_case))
        assert (found.kind, found.ranks) == (kind, (3,))
        assert "ann" not in found.reason
    loss = {**about(id="lost"), "at": NOON}
    lost = NodeLost(**loss, node="n1", silence_s=9.0, limit_s=8.0, reason="n1 is silent")
    shown = opened(trigger="node_lost", node="n1", trigger_fact="lost", reason="n1 is silent")
    found_case = cases_of(formed(), asked, lost, peer, shown).case("i")
    assert found_case is not None
    found = await judged(in_time(found_case))
    assert (found.kind, found.nodes) == ("node_lost", ("n1",))


async def test_the_drain_of_a_spare_explains_no_loss_of_another_node() -> None:
    given = {**about(id="asked"), "at": NOON - timedelta(seconds=50)}
    asked = OperatorActed(
        **given, by="ann", action="drain_node", target="spare", outcome="accepted", reason="loud"
    )
    left = NodeLeft(
        **{**given, "id": "left"}, node="spare", cause="drained", reason="ann drains it"
    )
    loss = {**about(id="lost"), "at": NOON}
    lost = NodeLost(**loss, node="n1", silence_s=9.0, limit_s=8.0, reason="n1 is silent")
    shown = opened(trigger="node_lost", node="n1", trigger_fact="lost", reason="n1 is silent")
    found_case = cases_of(formed(), asked, left, lost, shown).case("i")
    assert found_case is not None
    found = await judged(in_time(found_case))
    assert (found.cause, found.nodes) == ("host", ("n1",))
    assert all(claim.cause != "scheduler" for claim, _ in found.evidence)
