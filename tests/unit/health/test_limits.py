"""What limits are learned from beats, how they rise and fall, and what an operator's word does."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.messages import LimitsDocument, SectionLimit, SectionSeen
from everstep_services.health.domain.limit_learner import (
    FIRST_STEP,
    LimitLearner,
    configured,
    is_enough,
)
from everstep_services.health.settings import LimitSettings
from tests.unit.health.fleet import beat

SETTINGS = LimitSettings()


def seen(section: str, longest_s: float, times: int = 10, kind: str = "plain") -> SectionSeen:
    return SectionSeen(section=section, kind=kind, longest_s=longest_s, observations=times)


class Job:
    """One job's lessons, and the document as its agents read it."""

    def __init__(self, settings: LimitSettings = SETTINGS) -> None:
        self.settings = settings
        self.learner = LimitLearner(settings)
        self.document: LimitsDocument | None = None
        self.now = 100.0

    def beat(
        self, *sections: SectionSeen, round: int = 1, node: str = "a", config: str = ""
    ) -> LimitsDocument | None:
        """A tenth beat of a node, and what is written after it."""
        self.now += 10
        said = beat(node, 1, round=round, sections=sections, config_fingerprint=config)
        self.learner.hear(said, self.now)
        return self.write()

    def started(self, took_s: float, round: int = 1) -> LimitsDocument | None:
        self.now += 1
        self.learner.started(round, took_s, self.now)
        return self.write()

    def write(self) -> LimitsDocument | None:
        new = self.learner.proposed("j", self.document)
        self.document = new or self.document
        return new

    def limit(self, section: str) -> SectionLimit:
        assert self.document is not None
        return next(one for one in self.document.limits if one.section == section)

    @property
    def sections(self) -> set[str]:
        return {one.section for one in self.document.limits} if self.document else set()


@pytest.mark.parametrize(
    ("longest_s", "kind", "limit_s", "source"),
    [
        (0.1, "plain", 120, "floor"),
        (30, "plain", 150, "learned"),
        (500, "plain", 1800, "cap"),
        (1200, "plain", 2400, "cap"),  # never below twice the longest
        (10, "checkpoint", 900, "floor"),
        (400, "checkpoint", 2000, "learned"),
        (400, "evaluation", 2000, "learned"),
        (9000, "evaluation", 18000, "cap"),
        (10, "of a newer release", 900, "floor"),  # the least harmful
    ],
)
def test_a_limit_is_five_times_the_longest_between_floor_and_cap(
    longest_s: float, kind: str, limit_s: float, source: str
) -> None:
    job = Job()
    job.beat(seen("s", longest_s, kind=kind))
    assert (job.limit("s").limit_s, job.limit("s").source) == (limit_s, source)


def test_the_longest_of_all_nodes_counts() -> None:
    job = Job()
    job.beat(seen("data", 30), node="a")
    job.beat(seen("data", 60), node="b")
    job.beat(seen("data", 40), node="c")
    assert (job.limit("data").limit_s, job.limit("data").longest_s) == (300, 60)


def test_nothing_is_learned_from_too_few_observations() -> None:
    job = Job()
    assert job.beat(seen("data", 30, times=2), seen("", 0.0, times=0)) is None
    job.beat(seen("save", 30, times=1, kind="checkpoint"))
    assert job.sections == {"save"}
    job.beat(seen("data", 30, times=3))
    assert job.sections == {"save", "data"}


def test_a_limit_rises_at_once_and_falls_by_half_a_round_that_is_over() -> None:
    job = Job()
    job.beat(seen("data", 40))
    job.beat(seen("data", 200))
    assert job.limit("data").limit_s == 1000
    assert job.beat(seen("data", 30), round=2) is None  # round 1 had 200: nothing falls
    assert job.beat(seen("data", 30), round=2) is None
    job.beat(seen("data", 30), round=3)
    assert job.limit("data").longest_s == pytest.approx((200 + 30) / 2)
    job.beat(seen("data", 30), round=3)
    assert job.limit("data").longest_s == pytest.approx(115), "once a round"
    job.beat(seen("data", 400), round=3)
    assert job.limit("data").limit_s == 1800


def test_what_changes_by_a_tenth_or_less_is_not_written() -> None:
    job = Job()
    job.beat(seen("data", 100))
    assert job.beat(seen("data", 110)) is None
    assert job.beat(seen("data", 111)) is not None


def test_sections_of_earlier_rounds_and_allocations_keep_their_limits() -> None:
    job = Job()
    job.beat(seen("data", 100), seen("rare", 200))
    job.learner = LimitLearner(SETTINGS)  # another replica, another allocation
    assert job.beat(seen("data", 50), round=2) is None
    assert job.limit("rare").limit_s == 1000


def test_another_configuration_begins_anew_and_keeps_only_what_people_set() -> None:
    job = Job()
    job.beat(seen("data", 100), seen("forward", 100), config="one")
    job.started(600)
    assert job.document is not None
    job.document = configured(job.document, "save", 42, SETTINGS)
    job.beat(round=2, config="two")
    assert job.document is not None
    assert [(one.section, one.limit_s) for one in job.document.limits] == [("save", 42)]
    assert job.document.first_step_limit_s == 7200
    assert job.document.config_fingerprint == "two"
    job.beat(seen("data", 30), round=2, config="two")
    assert job.limit("data").limit_s == 150


def test_nodes_that_disagree_about_the_configuration_do_not_unlearn_each_other() -> None:
    one, other = Job(), Job()
    one.beat(seen("data", 100), config="one")
    other.document = one.document
    assert other.beat(seen("data", 100), config="two") is None
    assert other.beat(seen("data", 200), config="two") is not None
    one.document = other.document
    assert one.beat(seen("data", 100), config="one") is None
    assert one.document is not None
    assert one.document.config_fingerprint == "one"


def test_a_lost_document_is_made_again_from_the_next_beats() -> None:
    job = Job()
    job.beat(seen("data", 100))
    before, job.document = job.document, None
    job.beat(seen("data", 100))
    assert job.document == before


def test_the_first_step_keeps_120_minutes_until_one_was_seen() -> None:
    job = Job()
    job.beat(seen("data", 100))
    assert job.document is not None
    assert job.document.first_step_limit_s == 7200
    job.started(60)
    assert job.document.first_step_limit_s == 3600
    job.started(1000, round=2)
    assert job.document.first_step_limit_s == 5000
    job.started(200, round=3)
    assert job.document.first_step_longest_s == 1000
    job.started(200, round=4)
    assert job.document.first_step_longest_s == 600


def test_what_an_old_round_says_late_is_not_taken_for_the_new_one() -> None:
    job = Job()
    job.beat(seen("data", 30), round=5)
    assert job.beat(seen("data", 900), round=4) is None
    job.now += 600  # nobody is left in round 5: rounds have begun again
    assert job.beat(seen("data", 900), round=1) is not None


def test_an_operators_limit_wins_until_it_is_taken_away() -> None:
    job = Job()
    job.beat(seen("data", 30))
    assert job.document is not None
    job.document = configured(job.document, "data", 20, SETTINGS)
    assert (job.limit("data").limit_s, job.limit("data").source) == (20, "configured")
    job.beat(seen("data", 100))
    assert (job.limit("data").limit_s, job.limit("data").source) == (20, "configured")
    job.document = configured(job.document, "data", 0, SETTINGS)
    assert (job.limit("data").limit_s, job.limit("data").source) == (150, "learned")
    job.beat(seen("data", 100))
    assert job.limit("data").limit_s == 500
    job.document = configured(job.document, "never-seen", 7, SETTINGS)
    job.document = configured(job.document, "never-seen", 0, SETTINGS)
    assert job.sections == {"data"}


def test_an_operator_may_set_the_first_steps_limit() -> None:
    job = Job()
    job.started(1000)
    assert job.document is not None
    job.document = configured(job.document, FIRST_STEP, 90, SETTINGS)
    assert job.document.first_step_limit_s == 90
    job.started(1400, round=2)
    assert job.document.first_step_limit_s == 90
    job.document = configured(job.document, FIRST_STEP, 0, SETTINGS)
    assert job.document.first_step_limit_s == 5000


def test_numbers_that_mean_nothing_teach_nothing() -> None:
    job = Job()
    job.started(float("inf"))
    assert job.beat(seen("data", float("nan")), seen("x", -1.0), seen("y", float("inf"))) is None


SECTIONS = st.builds(
    seen,
    st.sampled_from(["data", "forward", "save"]),
    st.floats(0, 5000),
    st.integers(0, 20),
    st.sampled_from(["plain", "checkpoint"]),
)
BEATS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(["a", "b"]), st.lists(SECTIONS, max_size=3)),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(BEATS)
def test_no_limit_is_ever_below_twice_what_its_round_was_seen_to_take(
    beats: list[tuple[int, str, list[SectionSeen]]],
) -> None:
    job = Job()
    longest: dict[str, float] = {}
    newest = 0
    for number, node, sections in sorted(beats, key=lambda one: one[0]):
        if number > newest:
            newest, longest = number, {}
        for one in filter(lambda seen: is_enough(seen, SETTINGS), sections):
            longest[one.section] = max(longest.get(one.section, 0.0), one.longest_s)
        job.beat(*sections, round=number, node=node)
        for section, longest_s in longest.items():
            limit = job.limit(section)
            assert limit.limit_s >= 2 * longest_s / 1.1 - 1e-6  # a tenth more is not written
            assert limit.limit_s >= 120


@settings(max_examples=100, deadline=None)
@given(BEATS, st.randoms(use_true_random=False))
def test_two_replicas_that_hear_one_round_in_any_order_come_to_the_same(
    beats: list[tuple[int, str, list[SectionSeen]]], random: Random
) -> None:
    ours = [(1, node, sections) for _, node, sections in beats]
    theirs = list(ours)
    random.shuffle(theirs)
    one, other = Job(), Job()
    for number, node, sections in ours:
        one.learner.hear(beat(node, 1, round=number, sections=tuple(sections)), 1.0)
    for number, node, sections in theirs:
        other.learner.hear(beat(node, 1, round=number, sections=tuple(sections)), 1.0)
    assert one.write() == other.write()
