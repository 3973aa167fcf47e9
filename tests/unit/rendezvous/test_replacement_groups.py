"""Replacement groups: a lost node takes the rest of its group along, and a spare group follows."""

from everstep.messages import ActionDecided, DrainNode, LeaveJob, NodeJoined, NodeRefused, StopRanks
from tests.unit.rendezvous.world import World, spec


def world(*groups: str, nodes: int = 4, **fields: int) -> World:
    """A job of this many nodes, of which two belong to each of these groups; it runs."""
    made = World(spec(nodes, slots_per_group=2, **fields))
    for group in groups:
        made.join(f"{group}1", group=group)
        made.join(f"{group}2", group=group)
    made.run()
    return made


def dismissed(made: World) -> dict[str | None, int]:
    return {to: order.exit_code for to, order in made.orders if isinstance(order, LeaveJob)}


def test_the_rest_of_a_group_leaves_with_a_lost_node_and_a_spare_group_takes_its_slots() -> None:
    made = world("a", "b", "c")
    assert made.members() == ["a1", "a2", "b1", "b2"]
    made.gone("a1")
    for node in ("a2", "b1", "b2"):
        made.back(node, group=node[0])
    assert made.members() == ["c1", "c2", "b1", "b2"]
    assert dismissed(made) == {"a2": 0}
    why = "a1 is gone: the other nodes of its replacement group a leave with it"
    reasons = [order.reason for _, order in made.orders if isinstance(order, LeaveJob)]
    assert reasons == [f"{why}; the others continue without it"]


def test_the_decision_names_the_lost_node_and_those_that_leave_with_it() -> None:
    made = world("a", "b", "c")
    made.gone("a1")
    (decision,) = [fact for fact in made.of(ActionDecided) if fact.rule == "exclude.group"]
    assert decision.nodes_out == ("a2",)
    assert decision.reason == (
        "a1 is gone: the other nodes of its replacement group a leave with it"
    )


def test_without_a_spare_group_the_rest_waits_until_the_group_is_complete_again() -> None:
    made = world("a", "b")
    made.gone("a1")
    for node in ("a2", "b1", "b2"):
        made.back(node, group=node[0])
    assert made.doc.phase == "joining"
    assert not dismissed(made)
    made.join("a3", group="a")
    assert made.members() == ["a3", "a2", "b1", "b2"]


def test_a_group_with_a_node_to_spare_is_refilled_from_itself() -> None:
    made = World(spec(2, slots_per_group=2))
    for node in ("a1", "a2", "a3", "b1", "b2"):
        made.join(node, group=node[0])
    made.run()
    assert made.members() == ["a1", "a2"]
    made.gone("a1")
    made.back("a2", group="a")
    assert made.members() == ["a3", "a2"]
    assert not dismissed(made)


def test_a_drained_node_takes_its_group_along() -> None:
    made = world("a", "b", "c")
    made.apply(DrainNode(job="j", by="ann", reason="fan", node="b2", origin="cli"))
    assert any(isinstance(order, StopRanks) for _, order in made.orders)
    for node in ("a1", "a2", "b1", "b2"):
        made.back(node, group=node[0])
    assert made.members() == ["a1", "a2", "c1", "c2"]
    assert dismissed(made) == {"b1": 0, "b2": 0}


def test_a_spare_group_that_has_lost_a_node_gets_no_slot() -> None:
    made = world("a", "b", "c", "d")
    made.gone("c1")
    made.gone("a1")
    for node in ("a2", "b1", "b2"):
        made.back(node, group=node[0])
    assert made.members() == ["d1", "d2", "b1", "b2"]


def test_an_elastic_job_goes_on_with_whole_groups() -> None:
    made = World(spec(2, nodes_max=4, slots_per_group=2), elastic_wait_s=1)
    for node in ("a1", "a2", "b1", "b2"):
        made.join(node, group=node[0])
    made.tick(2)
    made.run()
    made.gone("b2")
    for node in ("a1", "a2", "b1"):
        made.back(node, group=node[0])
    made.tick(2)
    assert made.members() == ["a1", "a2"]
    assert dismissed(made) == {"b1": 0}


def test_a_node_without_a_group_is_refused() -> None:
    made = World(spec(2, slots_per_group=2))
    (joined,) = made.join("n1")
    assert joined.exit_code == 2
    (refused,) = made.of(NodeRefused)
    assert "give it --group, --domain or --topology" in refused.reason


def test_the_group_of_a_node_is_recorded() -> None:
    made = world("a", "b")
    assert {fact.node: fact.group for fact in made.of(NodeJoined)}["b2"] == "b"
