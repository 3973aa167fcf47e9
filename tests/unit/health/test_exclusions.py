"""Who is excluded, by which mode, for how long, and when health must stop (A10.3)."""

import dataclasses
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.messages import (
    BreakerClosed,
    BreakerOpened,
    Fact,
    NodeExcluded,
    NodeIncluded,
    NodeSuspected,
)
from everstep_services.health.nodes.exclusions import close_breaker, exiled, pardon
from tests.unit.health.nodes import SETTINGS, Nodes, failed

HOUR_S, DAY_S = 3600.0, 86400.0


def only(facts: list[Fact], of: type[NodeExcluded] = NodeExcluded) -> NodeExcluded:
    (found,) = [fact for fact in facts if isinstance(fact, of)]
    return found


def test_health_only_observes_unless_it_may_enforce() -> None:
    world = Nodes(enforces=False)
    world.fail_for_long("n1")
    fact = only(world.judge())
    assert (fact.mode, fact.node, fact.by, fact.ttl_s) == ("observe", "n1", "health", DAY_S)
    assert exiled(world.register) == {}
    assert world.judge() == []


def test_an_exclusion_says_why_how_long_and_what_is_left() -> None:
    world = Nodes()
    world.fail_for_long("n1")
    fact = only(world.judge())
    assert (fact.mode, fact.ttl_s, fact.exclusions_in_window) == ("enforce", DAY_S, 1)
    assert fact.reason == (
        "failed in 2 windows of 300 s, limit 2: gpu (replace) (exclusion 1 of 3; 1 of 5 within "
        "3600 s)"
    )
    assert list(exiled(world.register)) == ["n1"]


def test_its_time_passes_and_doubles_until_health_gives_up() -> None:
    world = Nodes()
    lasted = []
    for _ in range(5):
        world.fail_for_long("n1")
        fact = world.judge()
        if not any(isinstance(one, NodeExcluded) for one in fact):
            break
        ttl_s = only(fact).ttl_s
        assert ttl_s is not None
        lasted.append(ttl_s / DAY_S)
        world.wait(ttl_s - 1)
        assert world.judge() == []
        world.wait(1)
        (over,) = [one for one in world.judge() if isinstance(one, NodeIncluded)]
        assert (over.node, over.by) == ("n1", "health")
        assert exiled(world.register) == {}
    assert lasted == [1, 2, 4]


def test_without_new_evidence_a_node_is_not_excluded_again() -> None:
    world = Nodes()
    world.fail_for_long("n1")
    world.judge()
    world.wait(2 * DAY_S)
    assert world.names(world.judge()) == ["NodeIncluded"]
    world.wait(HOUR_S)
    assert world.judge() == []
    world.examined("n1", failed("gpu"))
    assert world.names(world.judge()) == ["NodeExcluded"]


def test_an_operator_who_includes_a_node_is_believed() -> None:
    world = Nodes()
    world.fail_for_long("n1")
    world.judge()
    pardon(world.register, "n1")
    assert exiled(world.register) == {}
    assert world.names(world.judge()) == ["NodeCleared"]
    world.examined("n1", failed("gpu"))
    assert world.judge() == [], "it begins anew"


@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (60, 3), (100, 5), (239, 11)])
def test_the_breaker_opens_at_a_share_of_all_nodes(nodes: int, most: int) -> None:
    world = Nodes(nodes=nodes)
    world.fail_for_long(*(f"n{number:02d}" for number in range(12)))
    opened = [fact for fact in world.judge() if isinstance(fact, BreakerOpened)]
    assert world.excluded == [f"n{number:02d}" for number in range(most)]
    assert [(fact.exclusions, fact.limit) for fact in opened] == [(most, most)]
    assert world.judge() == []


def test_the_breaker_closes_when_its_window_has_passed_and_the_rest_follows() -> None:
    world = Nodes(nodes=20)
    world.fail_for_long("n1", "n2")
    opened = next(fact for fact in world.judge() if isinstance(fact, BreakerOpened))
    assert (opened.exclusions, opened.limit, opened.window_s) == (1, 1, HOUR_S)
    assert "1 more are suspect by check" in opened.reason
    assert world.excluded == ["n1"]
    world.wait(HOUR_S - 1)
    assert world.judge() == []
    world.wait(1)
    said = world.judge()
    assert world.names(said) == ["BreakerClosed", "NodeExcluded"]
    assert world.excluded == ["n1", "n2"]


def test_an_operator_may_close_the_breaker() -> None:
    world = Nodes(nodes=20)
    world.fail_for_long("n1", "n2")
    world.judge()
    assert close_breaker(world.register, "ann", "it was the switch", world.moment)
    assert not close_breaker(world.register, "ann", "again", world.moment)
    (closed,) = [fact for fact in world.register.facts if isinstance(fact, BreakerClosed)]
    assert (closed.by, closed.reason) == ("ann", "it was the switch")
    world.wait(1)
    world.judge()
    assert world.excluded == ["n1", "n2"]


def test_what_was_only_observed_does_not_spend_what_may_be_enforced() -> None:
    world = Nodes(enforces=False)
    for _ in range(4):
        world.fail_for_long("n1")
        world.judge()
        world.wait(20 * DAY_S / 4)
    assert {fact.mode for fact in world.said if isinstance(fact, NodeExcluded)} == {"observe"}
    world.scope = dataclasses.replace(world.scope, enforces=True)
    world.fail_for_long("n1")
    assert only(world.judge()).mode == "enforce"


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "vague", "pass", "lost", "back", "verdict", "wait", "mode"]),
        st.integers(0, 5),
        st.sampled_from([5.0, 20.0, 2000.0, DAY_S]),
    ),
    min_size=30,
    max_size=100,
)


QUICK = replace(SETTINGS, check_window_s=10.0, strikes_limit=2, distrust_nodes=20)


class _Story:
    """Anything may happen to six nodes of a fleet of twenty."""

    def __init__(self) -> None:
        self.world = Nodes(QUICK, nodes=20)
        self.when: list[tuple[datetime, NodeExcluded]] = []
        self.spoken: set[str] = set()
        """Those with evidence against them that can be shown."""

    def act(self, what: str, number: int, seconds: float) -> None:
        world, node = self.world, f"n{number}"
        if what == "wait":
            world.wait(seconds)
        elif what == "mode":
            world.scope = dataclasses.replace(world.scope, enforces=not world.scope.enforces)
        elif what in {"fail", "lost", "verdict"}:
            self.spoken.add(node)
            self._against(what, node)
        else:
            self._for(what, node)
        for fact in world.judge():
            if isinstance(fact, NodeExcluded):
                self.when.append((world.wall, fact))

    def _against(self, what: str, node: str) -> None:
        match what:
            case "fail":
                self.world.examined(node, failed("gpu" if node < "n3" else "nic"))
            case "lost":
                self.world.lost(node)
            case _:
                self.world.verdict(f"incident-{self.world.new_id()}", node)

    def _for(self, what: str, node: str) -> None:
        world = self.world
        match what:
            case "pass":
                world.examined(node)
            case "back":
                world.returned(world.lost(node), node, "cut_off")
            case _:
                world.examined(f"vague-{node}", failed("gpu", "report"), failed("host", "watch"))
                world.verdict(f"incident-{world.new_id()}", f"vague-{node}", cause="user_code")


@settings(max_examples=60, deadline=None)
@given(ACTS)
def test_whatever_happens_the_bounds_hold(acts: list[tuple[str, int, float]]) -> None:
    story = _Story()
    for act in acts:
        story.act(*act)
    most = max(1, int(SETTINGS.breaker_ratio * 20))
    for at, fact in story.when:
        ages = [(at - one).total_seconds() for one, it in story.when if it.mode == fact.mode]
        assert sum(0 <= age < HOUR_S for age in ages) <= most
    for _, fact in story.when:
        assert fact.node in story.spoken, "nobody whom only the unknown speaks against"
    by_node = [(fact.node, fact.mode) for _, fact in story.when]
    assert all(by_node.count(one) <= SETTINGS.exclude_most for one in by_node)
    suspicions = {fact.node for fact in story.world.said if isinstance(fact, NodeSuspected)}
    assert {fact.node for _, fact in story.when} <= suspicions


@settings(max_examples=15, deadline=None)
@given(ACTS)
def test_the_same_facts_make_the_same_register(acts: list[tuple[str, int, float]]) -> None:
    one, other = _Story(), _Story()
    for act in acts:
        one.act(*act)
        other.act(*act)
    assert one.world.said == other.world.said
    assert one.world.register.nodes == other.world.register.nodes
