"""A probe with the policy `exclude` keeps its node out of all jobs (A10.3)."""

import dataclasses

import pytest
from msgspec.structs import replace

from everstep.messages import BreakerOpened, NodeCleared, NodeExcluded, NodeSuspected
from everstep_services.health.nodes.evidence import accused
from everstep_services.health.nodes.exclusions import ExclusionScope, exiled, pardon
from tests.unit.health.nodes import SETTINGS, Nodes, failed

DAY_S = 86400.0


def world_of(*, nodes: int = 100) -> Nodes:
    """No switch was moved: health only observes, and probes may exclude."""
    world = Nodes(nodes=nodes, enforces=False)
    world.scope = ExclusionScope(nodes, enforces=False, enforces_probes=True)
    return world


def test_a_confirmed_failure_excludes_the_node_at_once_with_its_evidence() -> None:
    world = world_of()
    decision = world.confirmed("n1")
    suspected, excluded = world.judge()
    assert isinstance(suspected, NodeSuspected)
    assert (suspected.node, suspected.cause) == ("n1", "probe")
    assert suspected.evidence == (decision.id, "f" * 32)
    assert suspected.reason == "j: nic fails on 1 of 3 nodes, and passes on 2"
    assert isinstance(excluded, NodeExcluded)
    assert (excluded.node, excluded.mode, excluded.ttl_s) == ("n1", "enforce", DAY_S)
    assert "nic fails on 1 of 3 nodes" in excluded.reason
    assert list(exiled(world.register)) == ["n1"]
    assert world.judge() == []


def test_where_exclusions_only_observe_it_is_only_recorded() -> None:
    world = world_of()
    world.scope = dataclasses.replace(world.scope, enforces_probes=False)
    world.confirmed("n1")
    _, excluded = world.judge()
    assert isinstance(excluded, NodeExcluded)
    assert excluded.mode == "observe"
    assert exiled(world.register) == {}


@pytest.mark.parametrize(
    "fact", [{"rule": "checks.alone"}, {"rule": "restart.budget_left"}, {"mode": "observe"}]
)
def test_only_a_failure_that_another_node_passes_counts(fact: dict[str, str]) -> None:
    world = world_of()
    assert accused(world.confirmed("n1", **fact)) == ()
    assert world.judge() == []


def test_a_failing_probe_alone_excludes_no_node_whatever_its_policy() -> None:
    """The agent reports; only the comparison by rendezvous accuses."""
    world = world_of()
    for _ in range(5):
        world.probed("n1", failure_class="replace")
        world.wait(10)
    assert world.judge() == []
    assert world.strikes("n1") == 1


def test_the_same_decision_read_twice_is_one_exclusion() -> None:
    world = world_of()
    world.take(world.confirmed("n1"))
    world.judge()
    assert world.excluded == ["n1"]
    (record,) = world.register.nodes.values()
    assert len(record.confirmed) == 1


def test_a_probe_that_passes_again_clears_the_node_but_its_time_goes_on() -> None:
    world = world_of()
    world.confirmed("n1")
    world.judge()
    world.probed("n1", "gpu", state="ok")
    world.probed("n1", state="unknown")
    assert world.judge() == [], "another check, and no result, say nothing about it"
    world.probed("n1", state="ok")
    (cleared,) = world.judge()
    assert isinstance(cleared, NodeCleared)
    assert list(exiled(world.register)) == ["n1"]
    world.wait(DAY_S)
    assert world.names(world.judge()) == ["NodeIncluded"]
    assert world.judge() == []


def test_it_is_excluded_again_for_twice_the_time_only_when_it_fails_again() -> None:
    world = world_of()
    world.confirmed("n1")
    world.judge()
    world.wait(DAY_S)
    assert world.names(world.judge()) == ["NodeIncluded"], "nothing new speaks against it"
    world.confirmed("n1")
    (excluded,) = world.judge()
    assert isinstance(excluded, NodeExcluded)
    assert excluded.ttl_s == 2 * DAY_S


def test_a_person_who_includes_the_node_drops_the_failure() -> None:
    world = world_of()
    world.confirmed("n1")
    world.judge()
    pardon(world.register, "n1")
    assert world.names(world.judge()) == ["NodeCleared"]
    assert exiled(world.register) == {}


def test_a_check_that_fails_on_most_nodes_is_distrusted_and_excludes_none() -> None:
    world = world_of(nodes=4)
    for node in ("n1", "n2", "n3", "n4"):
        world.probed(node, "site:raid", state="ok")
    world.confirmed("n1", "n2", "n3", check="site:raid")
    assert world.names(world.judge()) == ["CheckDistrusted"]
    assert world.excluded == []


def test_the_breaker_bounds_what_probes_exclude() -> None:
    world = world_of(nodes=20)
    for number in range(20):
        world.examined(f"well-{number}")
    world.confirmed("n1", "n2")
    said = world.judge()
    assert world.excluded == ["n1"]
    assert [fact for fact in said if isinstance(fact, BreakerOpened)]


def test_evidence_of_other_kinds_still_only_observes() -> None:
    world = world_of()
    world.fail_for_long("n1")
    (excluded,) = (fact for fact in world.judge() if isinstance(fact, NodeExcluded))
    assert excluded.mode == "observe"


def test_a_probe_does_not_hide_which_other_checks_run_on_a_node() -> None:
    """Of four nodes one fails the GPU check: no probe makes that half of all nodes."""
    world = Nodes(replace(SETTINGS, distrust_nodes=1))
    for node in ("n1", "n2", "n3", "n4"):
        world.examined(node)
        world.probed(node, state="ok")
    world.examined("n1", failed("gpu"))
    assert world.judge() == []
    assert world.register.distrusted == set()


def test_an_old_failure_is_forgotten() -> None:
    world = world_of()
    world.confirmed("n1")
    world.judge()
    world.wait(SETTINGS.strikes_window_s + 1)
    assert set(world.names(world.judge())) == {"NodeIncluded", "NodeCleared"}
    assert world.register.record("n1").confirmed == ()


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0, -30 * DAY_S, 30 * DAY_S])
def test_a_wrong_clock_of_the_reporter_neither_crashes_nor_lengthens_an_exclusion(
    off_s: float,
) -> None:
    """Times of others are never later than they are read; one too old to count excludes nobody."""
    world = world_of()
    world.wait(off_s)
    fact = world.confirmed("n1")
    world.wait(-off_s)
    world.take(fact)
    world.judge()
    is_forgotten = off_s < -SETTINGS.strikes_window_s
    assert world.excluded == ([] if is_forgotten else ["n1"])
    world.wait(DAY_S)
    world.judge()
    assert exiled(world.register) == {}
