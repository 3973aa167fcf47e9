"""Strikes, failing checks, and checks that are to blame themselves."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import (
    CheckDistrusted,
    CheckResult,
    NodeCleared,
    NodeLost,
    NodeSuspected,
    VerdictReached,
)
from everstep_services.health.nodes.evidence import accused
from tests.unit.health.nodes import SETTINGS, Nodes, failed

DAY_S = 86400.0


def test_a_fact_accuses_the_nodes_that_it_names_and_a_person_may_name_any() -> None:
    nodes = Nodes()
    facts = [
        nodes.examined("n1"),
        nodes.lost("n1"),
        nodes.slow("n1"),
        nodes.closed("i", trigger="node_lost", node="n1"),
        nodes.verdict("i", "n1"),
    ]
    assert [accused(fact) for fact in facts] == [("n1",)] * 5
    said = nodes.verdict("i", "n1")
    assert isinstance(said, VerdictReached)
    assert accused(replace(said, is_corrected=True)) == ()


def test_three_strikes_in_seven_days_over_all_jobs_make_a_node_suspect() -> None:
    """The reason lists the strikes (A10.6)."""
    world = Nodes()
    world.lost("n1")
    world.wait(3 * DAY_S)
    world.verdict("incident-1", "n1")
    assert world.judge() == []
    world.wait(3 * DAY_S)
    world.closed("incident-2", trigger="node_lost", node="n1", cause="connection closed")
    (suspected, _) = world.judge()
    assert isinstance(suspected, NodeSuspected)
    assert (suspected.cause, suspected.strikes, suspected.strikes_limit) == ("incidents", 3, 3)
    assert suspected.reason.startswith("3 strikes in 7 days, limit 3: lost by j: silent; ")
    assert len(suspected.evidence) == 3


def test_strikes_that_are_too_old_count_no_more_and_clear_the_node() -> None:
    world = Nodes()
    for _ in range(3):
        world.lost("n1")
    (suspected, *_) = world.judge()
    world.wait(7 * DAY_S)
    cleared = [fact for fact in world.judge() if isinstance(fact, NodeCleared)]
    assert [(fact.node, fact.suspicion) for fact in cleared] == [("n1", suspected.id)]
    world.wait(60 * DAY_S)
    world.judge()
    assert world.register.nodes == {}, "what is over is forgotten"


def test_a_fact_that_comes_twice_is_one_strike() -> None:
    world = Nodes()
    fact = world.lost("n1")
    for _ in range(5):
        world.take(fact)
    assert world.strikes("n1") == 1


def test_a_loss_and_the_incident_that_it_opened_are_one_strike() -> None:
    world = Nodes()
    loss = world.lost("n1")
    world.closed("incident-1", trigger="node_lost", node="n1", trigger_fact=loss.id)
    assert world.strikes("n1") == 1


@pytest.mark.parametrize(
    ("how", "strikes"), [("cut_off", 0), ("restarted", 1), ("paused", 0), ("", 1)]
)
@pytest.mark.parametrize("round", [2, None])
def test_a_node_that_was_only_not_heard_has_no_strike(
    how: str, strikes: int, round: int | None
) -> None:
    """Also if its incident is judged and closed after it came back."""
    world = Nodes()
    loss = world.lost("n1", round=round)
    world.returned(loss, "n1", how)
    assert world.strikes("n1") == strikes
    closed = {"trigger": "node_lost", "node": "n1", "trigger_fact": loss.id, "round": round}
    world.closed("incident-1", **closed)
    assert world.strikes("n1") == strikes
    if round is not None:
        world.verdict("incident-1", "n1", cause="host", round=round)
        assert world.strikes("n1") == strikes


def _reports(world: Nodes) -> list[Callable[[], object]]:
    """All that is said of one node that was lost in round 2."""
    closed = {"trigger": "node_lost", "node": "n1", "round": 2}
    return [
        lambda: world.lost("n1", round=2),
        lambda: world.closed("incident-1", **closed),
        lambda: world.verdict("incident-1", "n1", cause="host", round=2),
        lambda: world.verdict("incident-1", "n1", cause="host", revision=1, round=2),
    ]


def test_one_loss_is_one_strike_whoever_reports_it_and_when() -> None:
    for order in itertools.permutations(range(4)):
        world = Nodes()
        reports = _reports(world)
        for index in order:
            reports[index]()
            world.judge()
            assert world.strikes("n1") == 1
        world.lost("n1", round=3)
        assert world.strikes("n1") == 2, "another round is another event"


@pytest.mark.parametrize("excuse", [{"overload": "9 tasks"}, {"is_warden_alive": True}])
def test_a_host_that_lives_has_no_strike_but_for_a_broken_gpu(excuse: dict[str, Any]) -> None:
    for order in itertools.permutations(range(5)):
        world = Nodes()
        reports: list[Callable[[], object]] = [*_reports(world)]
        reports.append(partial(world.lost, "n1", round=2, **excuse))
        for index in order:
            reports[index]()
            world.judge()
        assert world.strikes("n1") == 0
        world.verdict("incident-1", "n1", cause="gpu", revision=2, round=2)
        assert world.strikes("n1") == 1


def test_a_verdict_that_blames_no_node_takes_back_the_strike() -> None:
    for order in itertools.permutations(range(3)):
        world = Nodes()
        reports = _reports(world)[:2]
        reports.append(partial(world.verdict, "i", cause="user_code", round=2))
        for index in order:
            reports[index]()
            world.judge()
        assert world.strikes("n1") == 0


def test_a_loss_in_the_round_after_the_incident_began_is_one_strike_with_it() -> None:
    world = Nodes()
    loss = world.lost("n1", round=3)
    world.verdict("incident-1", "n1", cause="host", round=2)
    world.closed("incident-1", trigger="node_lost", node="n1", trigger_fact=loss.id, round=2)
    assert world.strikes("n1") == 1


@pytest.mark.parametrize(
    "cause",
    [
        "user_code",
        "out_of_memory",
        "collective_mismatch",
        "data",
        "preemption",
        "operator",
        "injected",
        "scheduler",
        "storage",
        "inconclusive",
        "something new",
    ],
)
def test_what_is_not_the_nodes_fault_is_no_strike(cause: str) -> None:
    world = Nodes()
    world.verdict("incident-1", "n1", cause=cause)
    assert world.strikes("n1") == 0


def test_a_later_verdict_takes_the_place_of_an_earlier_one() -> None:
    world = Nodes()
    world.verdict("incident-1", "n1")
    world.verdict("incident-1", "n2", revision=1)
    world.verdict("incident-1", "n3", revision=0)  # late
    assert [world.strikes(node) for node in ("n1", "n2", "n3")] == [0, 1, 0]
    world.verdict("incident-1", "n2", cause="user_code", revision=2)
    assert world.strikes("n2") == 0


def test_a_verdict_takes_back_what_the_loss_had_made() -> None:
    """As a node that was taken away by its scheduler."""
    world = Nodes()
    loss = world.lost("n1")
    verdict = world.verdict("incident-1", cause="preemption")
    world.closed(
        "incident-1", trigger="node_lost", node="n1", trigger_fact=loss.id, verdict=verdict.id
    )
    assert world.strikes("n1") == 0
    loss = world.lost("n1")
    world.closed("incident-2", outcome="preempted", trigger_fact=loss.id)
    assert world.strikes("n1") == 0


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        (failed("gpu", "reset"), True),
        (failed("gpu", "reboot"), True),
        (failed("gpu", "drain"), True),
        (failed("gpu", "replace"), True),
        (failed("gpu", "watch"), False),
        (failed("gpu", "report"), False),
        (failed("gpu", ""), False),
        (failed("gpu", "something new"), False),
        (CheckResult(check="gpu", state="unknown", failure_class="replace"), False),
        (CheckResult(check="gpu", state="warning", failure_class="replace"), False),
        (CheckResult(check="gpu", state="something new", failure_class="replace"), False),
    ],
)
def test_only_failures_whose_class_says_so_speak_against_a_node(
    result: CheckResult, counts: bool
) -> None:
    world = Nodes()
    for _ in range(6):
        world.examined("n1", result)
        world.wait(SETTINGS.check_window_s)
        world.judge()
    assert world.strikes("n1") == int(counts)
    assert world.excluded == (["n1"] if counts else [])


def test_a_check_must_fail_in_two_windows() -> None:
    """Neither repetition within a window nor time alone is enough (A10.3)."""
    world = Nodes()
    for _ in range(5):  # again and again, within one window
        world.examined("n1", failed("gpu", subject="GPU-1", reason="row remapping failed"))
        world.wait(SETTINGS.check_window_s / 6)
    assert world.judge() == []
    world.wait(SETTINGS.check_window_s)
    assert world.judge() == [], "time alone is not evidence: it must be seen to fail again"
    world.examined("n1", failed("gpu", subject="GPU-1", reason="row remapping failed"))
    suspected, _ = world.judge()
    assert isinstance(suspected, NodeSuspected)
    assert (suspected.cause, suspected.failure_class) == ("check", "replace")
    assert suspected.reason == (
        "failed in 2 windows of 300 s, limit 2: gpu GPU-1 (replace): row remapping failed"
    )


def test_a_check_that_passes_in_between_begins_anew() -> None:
    world = Nodes()
    for _ in range(2):
        world.examined("n1", failed("gpu"))
        world.wait(SETTINGS.check_window_s)
        world.examined("n1")
        world.wait(SETTINGS.check_window_s)
    assert world.judge() == []


def test_a_check_that_cannot_tell_or_did_not_run_clears_nothing() -> None:
    """An unknown result is neither good nor bad (A15.2)."""
    world = Nodes()
    world.examined("n1", failed("gpu"))
    world.wait(SETTINGS.check_window_s)
    world.examined("n1", CheckResult(check="gpu", state="unknown", reason="no answer"))
    world.examined("n1", checks=("nic",))
    world.examined("n1", failed("gpu"))
    assert world.names(world.judge()) == ["NodeSuspected", "NodeExcluded"]
    world.examined("n1")
    assert world.names(world.judge()) == ["NodeCleared"]


def test_a_check_that_comes_and_goes_makes_strikes() -> None:
    world = Nodes()
    for _ in range(3):
        world.examined("n1", failed("nic", "drain"))
        world.examined("n1")
    suspected, *_ = world.judge()
    assert isinstance(suspected, NodeSuspected)
    assert suspected.cause == "incidents"


def test_when_a_check_fails_everywhere_the_check_is_to_blame() -> None:
    """No node has a strike while the check is distrusted (A10.5)."""
    world = Nodes()
    names = [f"n{number}" for number in range(6)]
    for name in names:
        world.examined(name)
    for name in names[:3]:
        world.examined(name, failed("gpu", reason="driver says no"))
    (distrusted,) = world.judge()
    assert isinstance(distrusted, CheckDistrusted)
    assert (distrusted.check, distrusted.nodes_failed, distrusted.nodes_checked) == ("gpu", 3, 6)
    for _ in range(5):
        world.wait(SETTINGS.check_window_s)
        for name in names[:3]:
            world.examined(name, failed("gpu"))
        assert world.judge() == []
    assert [world.strikes(name) for name in names] == [0] * 6
    world.examined("n0")
    names_said = world.names(world.judge())
    assert names_said == ["CheckTrusted", *["NodeSuspected"] * 2, *["NodeExcluded"] * 2]


@pytest.mark.parametrize(
    ("cause", "confidence", "strikes"),
    [
        ("host", 0.9, 1),
        ("device", None, 1),
        ("network", 0.5, 1),
        ("host", 0.3, 0),
        ("input", 0.9, 0),
        ("compute", 0.9, 0),
        ("design", 0.9, 0),
        ("unknown", 0.9, 0),
        ("astrology", 0.9, 0),
    ],
)
def test_a_slow_rank_speaks_against_its_node_where_the_node_is_to_blame(
    cause: str, confidence: float | None, strikes: int
) -> None:
    world = Nodes()
    world.slow("n1", cause=cause, confidence=confidence)
    assert world.strikes("n1") == strikes


def test_all_slow_ranks_of_a_job_are_one_strike() -> None:
    """A node is suspect by being slow only once it was in three jobs."""
    world = Nodes()
    for job in ("a", "a", "b", "a", "b"):
        world.slow("n1", job=job)
    assert (world.strikes("n1"), world.judge()) == (2, [])
    world.slow("n1", job="c")
    (suspected, *_) = world.judge()
    assert isinstance(suspected, NodeSuspected)
    assert "rank 3 of c is slow (host): 20 % above the median" in suspected.reason


@pytest.mark.parametrize(
    ("bad", "well", "is_distrusted"), [(2, 0, False), (3, 0, True), (3, 4, False), (50, 51, False)]
)
def test_a_check_is_distrusted_from_half_of_its_nodes_and_three_on(
    bad: int, well: int, is_distrusted: bool
) -> None:
    """The limits of that rule (A10.5)."""
    world = Nodes()
    for number in range(bad):
        world.examined(f"bad{number}", failed("nic", "drain"))
    for number in range(well):
        world.examined(f"well{number}")
    for number in range(100):
        world.examined(f"other{number}", checks=("host",))
    assert (world.names(world.judge()) == ["CheckDistrusted"]) is is_distrusted


def test_a_sender_whose_clock_is_wrong_moves_only_its_own_facts() -> None:
    world = Nodes()
    now = world.wall
    world.wait(400 * DAY_S)
    fact = NodeLost(**world.about(), node="n1", silence_s=3.0, limit_s=3.0, reason="silent")
    world.wall = now
    world.take(fact)
    assert [one.at for one in world.register.record("n1").strikes] == [now]


def test_a_flood_of_names_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_services.health.nodes.register._NODES_MOST", 10)
    world = Nodes()
    for number in range(30):
        world.examined(f"n{number}")
    assert len(world.register.nodes) == 10
