"""Devices that compute wrongly: repeated results count, and proof counts at once."""

from typing import Any

from everstep.messages import EvidenceItem, Fact, NodeSuspected
from tests.unit.health.nodes import Nodes


def corrupted(nodes: Nodes, incident: str, *, is_transient: bool | None, **more: Any) -> Fact:
    """A verdict on a judged result; all of them within one round, which goes on."""
    judged = EvidenceItem(says="it differs", analyzer="numerics", fact=more.pop("result", incident))
    return nodes.verdict(
        incident, "a", kind="silent_corruption", is_transient=is_transient, evidence=(judged,),
        round=1, **more,
    )  # fmt: skip


def test_a_device_that_computes_wrongly_each_time_makes_its_node_suspect_at_once() -> None:
    nodes = Nodes()
    corrupted(nodes, "i1", is_transient=False)
    (suspected, *_) = nodes.judge()
    assert isinstance(suspected, NodeSuspected)
    assert (suspected.node, suspected.cause, suspected.strikes) == ("a", "incidents", 1)
    assert suspected.reason == "gpu in j: XID 79"
    nodes.verdict("i1", cause="data", revision=1)
    nodes.judge()
    assert not nodes.register.record("a").suspicion


def test_results_that_did_not_come_again_count_each_within_the_window() -> None:
    nodes = Nodes()
    for number in range(2):
        corrupted(nodes, f"i{number}", is_transient=True)
        corrupted(nodes, f"i{number}", is_transient=True)
    assert nodes.strikes("a") == 2
    assert nodes.judge() == []
    corrupted(nodes, "i2", is_transient=None)
    nodes.judge()
    assert nodes.register.record("a").cause == "incidents"
    nodes.wait(7 * 86_400.0)
    nodes.judge()
    assert nodes.strikes("a") == 0


def test_the_round_that_ended_by_a_result_is_not_counted_as_another_one() -> None:
    nodes = Nodes()
    corrupted(nodes, "i1", is_transient=True, result="r")
    corrupted(nodes, "i2", is_transient=True, result="r")
    assert nodes.strikes("a") == 1


def test_an_unsure_verdict_and_a_person_who_knows_better_count_nothing() -> None:
    nodes = Nodes()
    corrupted(nodes, "i1", is_transient=False)
    nodes.verdict("i1", cause="user_code", revision=1, is_corrected=True)
    assert nodes.strikes("a") == 0
