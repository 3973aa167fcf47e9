"""Whatever order and repetition of facts: one message when it begins, one when it is over."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages import Fact, NoticesDocument
from everstep_services.history.notifications.facts import take
from everstep_services.history.notifications.notices import EVENTS, Delivery, Notices, Rules
from tests.unit.history.notice_facts import (
    BEGAN_S,
    allocation_ended,
    asked_to_drain,
    asked_to_stop,
    closed,
    decided,
    excluded,
    extended,
    fast,
    included,
    job_ended,
    judged,
    left,
    lost,
    opened,
    slow,
    story,
    watched,
)

RULES = Rules(
    events=frozenset(EVENTS),
    updates_most={"slack": 1, "pagerduty": 5},
    corrected=frozenset({"slack"}),
    settle_s=5.0,
    cooldown_s=300.0,
    slow_rank_after_s=60.0,
)


@dataclass
class World:
    """A sender with a clock of its own, whose targets take everything."""

    rules: Rules = RULES
    now: float = BEGAN_S
    sent: list[Delivery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notices = Notices(self.rules, NoticesDocument(), self.now)

    def take(self, *facts: Fact) -> None:
        for fact in facts:
            take(self.notices, fact, self.now)

    def after(self, seconds: float) -> list[Delivery]:
        """What is sent once this time has passed."""
        self.now += seconds
        self.notices.advance(self.now)
        found = [
            one for target in self.rules.updates_most for one in self.notices.deliveries(target)
        ]
        for one in found:
            self.notices.delivered(one)
        self.sent += found
        self.notices.advance(self.now)
        return found

    def take_over(self) -> None:
        """Another replica goes on with what was written."""
        data = msgspec.json.encode(self.notices.document("s", 1))
        document = msgspec.json.decode(data, type=NoticesDocument)
        self.notices = Notices(self.rules, document, self.now)

    def steps(self, target: str = "slack") -> list[tuple[str, str]]:
        return [(one.notice.event, one.step) for one in self.sent if one.target == target]


def test_of_a_stall_that_is_only_watched_the_message_tells_that_nothing_is_done() -> None:
    world = World()
    world.take(opened("i1"), watched("i1"))
    told = {delivery.notice.action for delivery in world.after(6)}
    assert told == {"nothing: stalls are only observed, and the round goes on"}
    world.take(decided("i1"), watched("i1"))
    (notice,) = world.notices.all()
    assert notice.action == "restart: 2 restarts are left"


def test_the_first_message_has_the_verdict_and_the_second_the_cost() -> None:
    world = World()
    world.take(opened("i1"), extended("i1", 1000))
    assert world.after(1) == []
    world.take(judged("i1", "gpu"), decided("i1"))
    first = world.after(5)
    assert [one.step for one in first] == ["firing", "firing"]
    assert (first[0].notice.cause, first[0].notice.affected) == ("gpu", 1000)
    assert first[0].notice.action == "restart: 2 restarts are left"
    world.take(closed("i1"))
    second = world.after(0)
    assert [one.step for one in second] == ["resolved", "resolved"]
    assert (second[0].notice.outcome, second[0].notice.lost_s) == ("recovered", 7.5)
    assert len(world.notices) == 0


def test_what_is_over_before_it_is_sent_is_one_message() -> None:
    world = World()
    world.take(*story("i1"))
    (one, _) = world.after(5)
    assert (one.step, one.notice.state, one.notice.outcome) == ("resolved", "resolved", "recovered")
    assert world.after(1000) == []


def test_another_cause_is_one_further_message_where_it_is_a_message() -> None:
    world = World()
    world.take(opened("i1"), judged("i1", "gpu"))
    world.after(5)
    for revision, cause in enumerate(["network", "storage", "network"], start=1):
        world.take(judged("i1", cause, revision))
        world.after(1)
    assert world.steps("slack") == [("incident", "firing"), ("incident", "update")]
    assert [step for _, step in world.steps("pagerduty")] == ["firing", *["update"] * 3]
    keys = [one.key for one in world.sent]
    assert len(keys) == len(set(keys)) + 2  # the targets have the same keys


def test_another_cause_after_the_end_is_one_further_message_where_each_is_shown() -> None:
    """A11.5: also on a replica that takes over; a resolved alert is not opened again."""
    world = World()
    world.take(opened("i1"), judged("i1", "unknown"), closed("i1"))
    assert [one.step for one in world.after(5)] == ["resolved", "resolved"]
    assert len(world.notices) == 0
    world.take_over()
    world.take(judged("i1", "unknown", 1))
    assert world.after(30) == []
    world.take(judged("i1", "host", 2))
    assert len(world.notices) == 1
    (late,) = world.after(0)
    assert (late.target, late.step, late.key) == ("slack", "update", "j/i1/update-1")
    assert (late.notice.state, late.notice.cause) == ("resolved", "host")
    world.take(judged("i1", "gpu", 3), closed("i1"))
    assert world.after(0) == []
    assert world.notices.all() == ()


def test_another_cause_of_a_failed_jobs_incident_is_one_further_message() -> None:
    """A11.5: the message of the job is the one about the incident, on every replica."""
    world = World()
    world.take(
        opened("i1"), judged("i1", "unknown"), closed("i1"), job_ended("failed", incident="i1")
    )
    first = world.after(5)
    assert {(one.notice.event, one.step) for one in first} == {("job_failed", "firing")}
    assert len(world.notices) == 0
    world.take_over()
    world.take(judged("i1", "unknown", 1), judged("i2", "gpu"))
    assert world.after(30) == []
    world.take(judged("i1", "host", 2))
    late = world.after(0)
    assert {(one.target, one.step) for one in late} == {
        ("slack", "update"),
        ("pagerduty", "update"),
    }
    assert {(one.notice.event, one.notice.cause) for one in late} == {("job_failed", "host")}
    world.take(judged("i1", "gpu", 3), closed("i1"))
    assert [one.target for one in world.after(0)] == ["pagerduty"]
    assert world.steps() == [("job_failed", "firing"), ("job_failed", "update")]
    world.after(601)
    assert [notice for notice in world.notices.all() if notice.event == "job_failed"] == []
    world.take(judged("i1", "data", 4))
    assert world.after(5) == []


def test_an_incident_with_a_message_of_its_own_is_corrected_apart_from_its_job() -> None:
    world = World()
    world.take(opened("i1"), judged("i1", "unknown"))
    world.after(5)
    world.take(closed("i1"), job_ended("failed", incident="i1"))
    world.after(5)
    world.take(judged("i1", "host", 1))
    told = [(one.target, one.notice.event, one.step) for one in world.after(0)]
    assert told == [("slack", "incident", "update")]


def test_a_verdict_long_after_the_end_is_not_sent() -> None:
    world = World()
    world.take(*story("i1"))
    world.after(5)
    world.after(601)
    assert world.notices.all() == ()
    world.take(judged("i1", "network", 1))
    assert world.after(0) == []


def test_open_notices_are_not_dropped_for_those_that_wait_for_a_late_verdict() -> None:
    world = World()
    world.take(*story("i0"))
    world.after(5)
    world.take(*(opened(f"i{number}", job=f"j{number}") for number in range(1, 501)))
    assert (len(world.notices), world.notices.dropped) == (500, 0)


def test_an_older_revision_of_a_verdict_changes_nothing() -> None:
    world = World()
    world.take(opened("i1"), judged("i1", "gpu", 1), judged("i1", "network", 0))
    assert world.after(5)[0].notice.cause == "gpu"


def test_incidents_alike_are_counted_and_told_together() -> None:
    world = World()
    world.take(*story("i0"))
    world.after(5)
    for number in range(1, 9):
        world.take(*story(f"i{number}"))
        assert world.after(30) == []
    (told, _) = world.after(60)
    assert told.notice.more == 7
    assert world.notices.cooled == 7
    assert world.after(1000) == []


def test_other_causes_are_not_cooled() -> None:
    world = World()
    world.take(opened("i1"), judged("i1", "gpu"))
    world.after(5)
    world.take(opened("i2"), judged("i2", "network"))
    assert [one.notice.subject for one in world.after(5)] == ["i2", "i2"]


def test_a_late_verdict_cools_its_cause() -> None:
    world = World()
    world.take(opened("i1"))
    world.after(5)
    world.take(judged("i1", "gpu"))
    world.after(1)
    world.take(opened("i2"), judged("i2", "gpu"))
    assert world.after(5) == []


def test_a_merged_incident_is_told_by_the_other_one() -> None:
    world = World()
    world.take(opened("i1"), closed("i1", "merged"), opened("i2"))
    assert {one.notice.subject for one in world.after(5)} == {"i2"}


def test_a_failed_job_is_told_once_with_its_incident() -> None:
    world = World()
    world.take(opened("i1"), judged("i1", "gpu"), closed("i1", "failed"))
    world.now += 0.5
    world.take(job_ended("failed", incident="i1"))
    world.after(4.6)
    world.after(1)
    assert world.steps() == [("job_failed", "firing")]
    assert world.sent[0].notice.cause == "gpu"
    world.take(job_ended("failed", incident="i1"))
    assert world.after(1000) == []


def test_a_job_that_a_person_stops_is_no_news() -> None:
    world = World()
    world.take(asked_to_stop(), job_ended("stopped"))
    world.take(job_ended("stopped", job="k"), asked_to_stop(job="k"))
    world.take(job_ended("stopped", job="m"), asked_to_stop(job="m", origin="service"))
    assert {one.notice.job for one in world.after(5)} == {"m"}
    assert {one.step for one in world.sent} == {"firing"}


def test_a_job_that_gives_up_for_want_of_nodes_is_told_once() -> None:
    """Nobody else starts it again (A11.2). Its second allocation ends with the first."""
    world = World()
    world.take(
        allocation_ended(92, allocation="a"), allocation_ended(92, allocation="b"),
        allocation_ended(90, allocation="c", state="lost"),
        allocation_ended(1, allocation="d"), allocation_ended(None, allocation="e", state="lost"),
    )  # fmt: skip
    first = world.after(5)
    assert world.steps() == [("job_stopped", "firing")]
    assert "1 of 2 nodes joined within 600 s" in first[0].notice.reason
    world.take(allocation_ended(92, allocation="a"), allocation_ended(92, allocation="b"))
    assert world.after(1000) == []


def test_a_slow_rank_is_told_when_it_lasts() -> None:
    world = World()
    world.take(slow(1), slow(2))
    assert world.after(30) == []
    world.take(fast(1))
    assert [one.notice.ranks for one in world.after(30)] == [(2,), (2,)]
    world.take(fast(2))
    assert [one.step for one in world.after(0)] == ["resolved", "resolved"]
    world.take(fast(3), slow(3))
    assert world.after(1000) == []


def test_a_node_is_excluded_and_may_join_again() -> None:
    world = World()
    world.take(excluded("n1"))
    world.after(5)
    world.take(included("n1"), excluded("n1", 1), included("n1"), excluded("n1"))
    world.after(0)
    assert world.steps() == [("node_excluded", "firing"), ("node_excluded", "resolved")]
    world.after(400)  # the second exclusion, which the same fact did not end
    assert world.steps()[2:] == [("node_excluded", "firing")]


def test_a_drained_node_is_told_until_it_has_left() -> None:
    """Without an exclusion nothing else would tell a receiver that the node may be serviced."""
    world = World()
    world.take(left("n1", at=datetime.fromtimestamp(BEGAN_S, UTC)), asked_to_drain("n1"))
    world.take(asked_to_drain("n1", 1), asked_to_drain("n2", outcome="refused"))
    world.take(asked_to_drain("n1"), left("n1", job="k"))
    (firing, _) = world.after(5)
    assert (firing.step, firing.notice.event, firing.notice.nodes) == (
        "firing",
        "node_drained",
        ("n1",),
    )
    assert firing.notice.action == "drained by change-management (webhook)"
    world.take_over()
    world.take(left("n1"), left("n1"))
    (resolved, _) = world.after(0)
    assert (resolved.step, resolved.notice.outcome) == ("resolved", "left")
    assert world.after(400) == []
    assert len(world.notices) == 0


def test_a_drain_ends_with_the_node_or_its_job_and_a_quick_one_is_one_message() -> None:
    world = World()
    world.take(asked_to_drain("n1"), lost("n1"), asked_to_drain("n2", job="k"))
    world.take(job_ended("done", job="k"))
    told = {(one.notice.subject, one.step, one.notice.outcome) for one in world.after(5)}
    assert told == {("n1", "resolved", "lost"), ("n2", "resolved", "job_over")}


def test_only_what_is_wanted_is_sent() -> None:
    world = World(Rules(events=frozenset({"job_failed"}), updates_most={"slack": 1}))
    world.take(opened("i1"), excluded("n1"), job_ended("failed", job="k"))
    world.after(5)
    assert world.steps() == [("job_failed", "firing")]


def test_history_is_not_news() -> None:
    world = World()
    long_ago = datetime.fromtimestamp(BEGAN_S - 7200, UTC)
    world.take(opened("i1", at=long_ago))
    world.take(closed("i1"))
    assert world.after(1000) == []
    world.now += 7200
    world.take(opened("i2"))
    assert world.after(1000) == []


def test_a_target_that_refuses_is_left_alone() -> None:
    world = World()
    world.take(opened("i1"))
    world.now += 5
    world.notices.advance(world.now)
    for target in RULES.updates_most:
        for one in list(world.notices.deliveries(target)):
            world.notices.given_up(one)
    world.take(judged("i1", "gpu"), closed("i1"))
    assert world.after(1) == []


def test_a_clock_that_was_ahead_holds_nothing_back() -> None:
    world = World()
    world.now += 3600
    late = world.now
    world.take(opened("i1", at=datetime.fromtimestamp(late, UTC)))
    world.now = BEGAN_S + 10
    world.take_over()
    assert len(world.after(5)) == 2


FACTS = [fact for number in range(4) for fact in story(f"i{number}")]
FACTS += [slow(1), fast(1), slow(2), fast(2), job_ended("failed", job="k")]
MOVES = st.lists(
    st.one_of(
        st.sampled_from(FACTS), st.sampled_from([1.0, 6.0, 70.0, 301.0]), st.just("take over")
    ),
    max_size=60,
)


@given(MOVES, st.permutations(FACTS))
def test_at_most_one_of_each_and_none_lost(
    moves: Iterable[Fact | float | str], rest: list[Fact]
) -> None:
    world = World()
    for move in [*moves, *rest]:
        if isinstance(move, float):
            world.after(move)
        elif isinstance(move, str):
            world.take_over()
        else:
            world.take(move)
    for _ in range(4):
        world.after(400)
    counts = Counter((one.target, one.notice.id, one.step) for one in world.sent)
    steps = {key: count for key, count in counts.items() if key[2] != "update"}
    assert all(count == 1 for count in steps.values())
    fired = {(target, id_) for target, id_, step in steps if step == "firing"}
    over = {(target, id_) for target, id_, step in steps if step == "resolved"}
    assert all((target, id_) in over for target, id_ in fired if "/ended/" not in id_)
    told = [one.notice for one in world.sent if one.target == "slack" and one.step != "update"]
    ids = {one.id for one in told}
    more = {one.id: one.more for one in told}
    incidents = sum(1 for id_ in ids if id_.startswith("j/i"))
    assert incidents + sum(more[id_] for id_ in ids if id_.startswith("j/i")) == 4
    assert any(id_.startswith("k/ended/") for id_ in ids)
    assert len(world.notices) == 0


def test_the_document_is_bounded() -> None:
    world = World()
    at = datetime.fromtimestamp(BEGAN_S, UTC) + timedelta(seconds=1)
    for number in range(3000):
        world.take(opened(f"i{number}", job=f"j{number}", at=at, reason="x" * 10_000))
    assert len(world.notices) == 500
    assert world.notices.dropped == 2500
    assert len(msgspec.json.encode(world.notices.document("s", 1))) < 1_000_000
