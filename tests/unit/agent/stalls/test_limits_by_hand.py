"""A limit that somebody has set acts wherever its name is open, whatever the rank does there.

The table: each name, in each place where a rank can be silent, in each way of being silent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from everstep.messages import LimitsDocument, SectionLimit
from everstep_services.agent.stalls.judge import Stalled, StallJudge
from everstep_services.agent.stalls.limits import LimitRules, StallLimits
from everstep_services.agent.stalls.rank_view import ActivitySigns
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages, limits_of
from trainer_sdk import layout

LIMIT_S = 3.0
NAMES = ("first-step", "step", "heartbeat", "outside", "data", "checkpoint")
WAYS = {
    "idle": ActivitySigns(idle_s=60.0),
    "busy in Python": ActivitySigns(idle_s=0.0),
    "busy, and in no collective": ActivitySigns(idle_s=0.0, is_recorded=True),
    "holding the interpreter's lock": ActivitySigns(),
    "sleeping in C": ActivitySigns(idle_s=60.0, is_recorded=True),
    "in a collective": ActivitySigns(idle_s=60.0, waits_in="gloo:all_reduce", is_recorded=True),
}
Go = Callable[[StallRank], None]


@dataclass(frozen=True)
class Silence:
    """Where a rank is silent, and which names are open there."""

    open: tuple[str, ...]
    arrive: Go
    go_on: Go | None = None
    """What it does all the time, that is none of the progress that these limits want."""


def unmodified(rank: StallRank) -> None:
    rank.link.words[layout.PHASE] = layout.PHASE_SCRIPT


def optimizer_steps(rank: StallRank) -> None:
    unmodified(rank)
    words = rank.link.words
    words[layout.STEPS] = words[layout.STEP] = 5
    words[layout.COUNTED_BY] = layout.BY_OPTIMIZER


def session(rank: StallRank) -> None:
    assert rank.run.steps_made == 0


def steps(rank: StallRank) -> None:
    for _ in range(3):
        rank.run.step()


def step_on(rank: StallRank) -> None:
    rank.run.step()


def beats(rank: StallRank) -> None:
    for _ in range(3):
        rank.run.heartbeat()


def section(name: str, before: Go) -> Go:
    def enter(rank: StallRank) -> None:
        before(rank)
        rank.run.begin(name)

    return enter


def closed(before: Go) -> Go:
    def close(rank: StallRank) -> None:
        before(rank)
        rank.run.close()

    return close


def inner_section(rank: StallRank) -> None:
    with rank.run.section("inner"):
        pass


def outer_and_inner(rank: StallRank) -> None:
    section("data", steps)(rank)
    rank.run.begin("inner")


def script_over(rank: StallRank) -> None:
    steps(rank)
    rank.link.words[layout.PHASE] = layout.PHASE_ENDED


def nothing(_: StallRank) -> None:
    pass


def paused(rank: StallRank) -> None:
    section("data", steps)(rank)
    rank.run.pause()


PLACES = {
    "before its script": Silence(("first-step",), nothing),
    "unmodified, from its first line on": Silence(("first-step", "outside"), unmodified),
    "unmodified, after steps": Silence(("step", "outside"), optimizer_steps),
    "in a session, before the first step": Silence(("first-step", "outside"), session),
    "in a section, before the first step": Silence(
        ("first-step", "data"), section("data", session)
    ),
    "sections only, and none is a step": Silence(
        ("data",), section("data", session), inner_section
    ),
    "steps only": Silence(("step", "outside"), steps),
    "in a section, after steps": Silence(("step", "data"), section("data", steps)),
    "in an inner section": Silence(("step", "data"), outer_and_inner),
    "inner sections come and go": Silence(("step", "data"), section("data", steps), inner_section),
    "sections come and go": Silence(("step",), steps, inner_section),
    "in a checkpoint": Silence(("checkpoint",), section("checkpoint", steps)),
    "heartbeats only": Silence(("heartbeat", "outside"), beats),
    "heartbeats only, in a section": Silence(("heartbeat", "data"), section("data", beats)),
    "heartbeats, while sections come and go": Silence(("heartbeat",), beats, inner_section),
    "its session is closed, before a step": Silence(("first-step", "outside"), closed(session)),
    "its session is closed": Silence(("outside",), closed(steps)),
    "its session is closed, after heartbeats": Silence(("outside",), closed(beats)),
    "its script is over": Silence((), script_over),
    "paused": Silence((), paused),
}


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class One:
    """A rank, and its judge."""

    def __init__(self, folder: Path, clock: Clock, limits: StallLimits) -> None:
        self.clock = clock
        self.rank = StallRank(folder, 0, clock)
        self.limits = limits
        self.judge = StallJudge(limits, clock.now)
        self.stalled: list[Stalled] = []

    def wait(self, seconds: float, go_on: Go | None = None, every_s: float = 0.5) -> None:
        """Let time pass: the judge looks when it wants to, the rank does what it does."""
        end = self.clock.now + seconds
        again = end if go_on is None else self.clock.now + every_s
        while self.clock.now < end:
            news = self.judge.look([self.rank.view()], self.clock.now)
            self.stalled += [one for one in news if isinstance(one, Stalled)]
            self.clock.now = min(end, again, max(self.judge.wake_at, self.clock.now + 0.001))
            if go_on is not None and self.clock.now >= again:
                again += every_s
                go_on(self.rank)

    @property
    def found(self) -> list[tuple[str, float]]:
        return [(one.place.limit.name, one.place.limit.s) for one in self.stalled]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_each_name_acts_where_it_is_open_and_nowhere_else(
    tmp_path: Path, clock: Clock, place: str, way: str
) -> None:
    """A3.2: silence is found at the limit of where it is."""
    silence = PLACES[place]
    shut = [name for name in NAMES if name not in silence.open]
    for names in (*([name] for name in silence.open), shut):
        one = One(tmp_path, clock, limits_of(**dict.fromkeys(names, LIMIT_S)))
        silence.arrive(one.rank)
        clock.now += 0.25  # what was seen of its process is of a later moment
        one.rank.signs, one.rank.looked_s = WAYS[way], clock.now
        one.wait(LIMIT_S - 0.3, silence.go_on)
        assert one.found == [], f"{names}: found too early"
        one.wait(3.0, silence.go_on)
        expected = [] if names is shut else [(names[0], LIMIT_S)]
        assert one.found == expected
        for stalled in one.stalled:
            assert stalled.waited_s == pytest.approx(LIMIT_S, abs=0.51)


def test_a_section_of_another_thread_has_its_limit_too(tmp_path: Path, clock: Clock) -> None:
    import threading

    one = One(tmp_path, clock, limits_of(load=LIMIT_S))
    run = one.rank.run
    run.step()
    entered, leave = threading.Event(), threading.Event()

    def load() -> None:
        with run.section("load"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=load)
    thread.start()
    assert entered.wait(60)
    one.rank.signs = WAYS["in a collective"]  # the main thread is, again and again

    def step_seen(rank: StallRank) -> None:
        step_on(rank)
        rank.looked_s = clock.now

    one.wait(10, step_seen)
    leave.set()
    thread.join()
    assert one.found == [("load", LIMIT_S)]
    assert [stall.place.waits_in for stall in one.stalled] == [None]


def test_a_heartbeat_in_a_section_begins_its_time_anew(tmp_path: Path, clock: Clock) -> None:
    one = One(tmp_path, clock, limits_of(data=LIMIT_S))
    section("data", steps)(one.rank)
    one.wait(60, lambda rank: rank.run.heartbeat())
    assert one.found == []
    one.wait(4)
    assert one.found == [("data", LIMIT_S)]


def test_heartbeats_and_steps_are_progress_between_steps(tmp_path: Path, clock: Clock) -> None:
    one = One(tmp_path, clock, limits_of(step=LIMIT_S, heartbeat=LIMIT_S))
    steps(one.rank)
    one.wait(60, lambda rank: rank.run.heartbeat())
    one.wait(60, step_on)
    assert one.found == []


def test_a_pause_and_a_compilation_interrupt_every_limit(tmp_path: Path, clock: Clock) -> None:
    one = One(tmp_path, clock, limits_of(outer=LIMIT_S, step=LIMIT_S, heartbeat=LIMIT_S))
    section("outer", steps)(one.rank)
    one.rank.run.heartbeat()
    one.wait(2)
    one.rank.run.pause()
    one.wait(100)
    one.rank.run.resume()
    one.wait(2)
    one.rank.link.words[layout.COMPILING_NS] = clock.ns()
    one.wait(100)
    one.rank.link.words[layout.COMPILED_NS] = clock.ns()
    one.rank.link.words[layout.COMPILING_NS] = 0
    one.wait(2.9)
    assert one.found == []
    one.wait(0.2)
    assert len(one.found) == 1


@pytest.mark.parametrize(
    ("name", "arrive"),
    [
        ("data", section("data", session)),
        ("data", section("data", steps)),
        ("data", outer_and_inner),
        ("outside", unmodified),
        ("outside", optimizer_steps),
        ("outside", steps),
        ("step", optimizer_steps),
        ("step", section("step", steps)),
        ("heartbeat", beats),
        ("first-step", session),
    ],
)
def test_a_long_limit_is_not_cut_short_by_a_default(
    tmp_path: Path, clock: Clock, name: str, arrive: Go
) -> None:
    long_s = 8000.0
    one = One(tmp_path, clock, limits_of(**{name: long_s, "inner": long_s}))
    arrive(one.rank)
    one.wait(long_s - 1)
    assert one.found == []
    one.wait(2)
    assert one.found[0][1] == long_s


def test_what_is_learned_hides_no_outer_section_and_finds_none(
    tmp_path: Path, clock: Clock
) -> None:
    limits = limits_of()
    limits.learn(document(SectionLimit(section="epoch", limit_s=120, source="floor")))
    one = One(tmp_path, clock, limits)
    section("epoch", steps)(one.rank)

    def work(rank: StallRank) -> None:
        inner_section(rank)
        rank.run.step()

    one.wait(7000, work, every_s=60)
    assert one.found == []


def document(*limits: SectionLimit, fingerprint: str = "") -> LimitsDocument:
    return LimitsDocument(
        job="j", limits=limits, first_step_limit_s=0.0, reason="", config_fingerprint=fingerprint
    )


def test_what_is_set_while_the_job_runs_wins_and_is_given_back(
    tmp_path: Path, clock: Clock
) -> None:
    limits = limits_of(data=500)
    one = One(tmp_path, clock, limits)
    section("data", session)(one.rank)
    limits.learn(document(SectionLimit(section="data", limit_s=LIMIT_S, source="configured")))
    one.wait(4)
    assert [(found.place.limit.origin, found.place.limit.s) for found in one.stalled] == [
        ("everstep limits", LIMIT_S)
    ]
    limits.learn(document())
    assert limits.all_by_hand()["data"].s == 500


class TestWarmUp:
    def test_steps_that_warm_up_may_take_as_long_as_the_first(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        rules = LimitRules(configured={"step": LIMIT_S}, warmup_steps=3)
        one = One(tmp_path, clock, StallLimits(rules))
        self._third_step_is_bounded(one)

    def _third_step_is_bounded(self, one: One) -> None:
        for _ in range(2):
            one.rank.run.step()
            one.wait(1000)
        assert one.found == []
        one.rank.run.step()
        one.wait(4)
        assert one.found == [("step", LIMIT_S)]

    def test_the_script_may_say_how_many(self, tmp_path: Path, clock: Clock) -> None:
        one = One(tmp_path, clock, limits_of(step=LIMIT_S))
        one.rank.run.warm_up(3)
        self._third_step_is_bounded(one)

    def test_each_of_them_has_the_limit_of_the_first(self, tmp_path: Path, clock: Clock) -> None:
        configured = {"step": LIMIT_S, "first-step": 50.0}
        one = One(tmp_path, clock, StallLimits(LimitRules(configured=configured, warmup_steps=3)))
        one.wait(49)
        one.rank.run.step()
        one.rank.run.begin("step")
        one.wait(49)
        assert one.found == []
        one.wait(2)
        assert one.found == [("first-step", 50.0)]

    def test_a_section_that_is_called_step_acts_from_the_first_on(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        """As NVRx has it, where nobody has said that steps warm up."""
        one = One(tmp_path, clock, limits_of(step=LIMIT_S))
        section("step", session)(one.rank)
        one.wait(4)
        assert one.found == [("step", LIMIT_S)]

    def test_other_names_act_while_it_warms_up(self, tmp_path: Path, clock: Clock) -> None:
        rules = LimitRules(configured={"data": LIMIT_S}, warmup_steps=10)
        one = One(tmp_path, clock, StallLimits(rules))
        section("data", steps)(one.rank)
        one.wait(4)
        assert one.found == [("data", LIMIT_S)]

    def test_nothing_is_learned_of_steps_that_warm_up(self, tmp_path: Path, clock: Clock) -> None:
        one = One(tmp_path, clock, limits_of())
        run = one.rank.run
        run.warm_up(3)
        for took_s in (600.0, 500.0, 400.0, 1.0, 2.0, 1.0):
            with run.section("forward"):
                clock.now += took_s
            run.step()
        page, sections = one.rank.view_of_page.read(), one.rank.view_of_page.sections()
        assert page is not None
        assert page.longest_step_s == pytest.approx(2.0)
        (forward,) = (found for found in sections if found.name == "forward")
        assert forward.longest_s == pytest.approx(2.0)
        assert forward.observed == 3


class TestHeartbeats:
    def test_they_end_the_first_step_and_have_its_limit_until_they_are_learned(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        one = One(tmp_path, clock, limits_of(first_step=60))
        beats(one.rank)
        one.wait(7000)
        assert one.found == []
        one.wait(300)
        assert [(found.place.phase, found.place.limit.name) for found in one.stalled] == [
            ("heartbeat", "heartbeat")
        ]

    def test_what_is_learned_of_them_acts(self, tmp_path: Path, clock: Clock) -> None:
        limits = limits_of()
        limits.learn(document(SectionLimit(section="heartbeat", limit_s=900, source="floor")))
        one = One(tmp_path, clock, limits)
        beats(one.rank)
        one.wait(890)
        assert one.found == []
        one.wait(20)
        assert one.found == [("heartbeat", 900)]

    def test_what_is_learned_of_them_means_nothing_once_there_are_steps(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        """Promise 1: a script that beats only while it loads is not harmed later."""
        limits = limits_of()
        limits.learn(document(SectionLimit(section="heartbeat", limit_s=900, source="floor")))
        one = One(tmp_path, clock, limits)
        beats(one.rank)
        steps(one.rank)
        one.wait(1700)
        assert one.found == []


def test_nvrx_looks_outside_only_after_the_first_step(tmp_path: Path, clock: Clock) -> None:
    rules = LimitRules(configured={"outside": LIMIT_S}, is_outside_late=True)
    one = One(tmp_path, clock, StallLimits(rules))
    session(one.rank)
    one.wait(100)
    assert one.found == []
    steps(one.rank)
    one.wait(4)
    assert one.found == [("outside", LIMIT_S)]


def test_a_rank_in_an_outer_section_does_not_seem_to_have_stopped(
    tmp_path: Path, clock: Clock
) -> None:
    """It works on in there: a rank that waits for nothing is not excused by it."""
    judge = StallJudge(limits_of(epoch=3600, data=LIMIT_S), clock.now)
    late, busy = (StallRank(tmp_path, rank, clock) for rank in range(2))
    section("epoch", steps)(busy)
    steps(late)
    clock.now += 10
    late.run.begin("data")
    found: list[int] = []
    for _ in range(40):
        clock.now += 0.25
        inner_section(busy)
        busy.run.step()
        news = judge.look([late.view(), busy.view()], clock.now)
        found += [one.place.rank for one in news if isinstance(one, Stalled)]
    assert found == [0]


@pytest.mark.parametrize(
    ("rules", "found"), [(LimitRules(), 0), (limits_of(first_step=60).rules, 1)]
)
def test_a_program_that_never_speaks_has_only_a_limit_that_somebody_has_set(
    tmp_path: Path, clock: Clock, rules: LimitRules, found: int
) -> None:
    """Promise 1: with `--no-python` nobody knows whether it has made its first step."""
    node = WatchedNode(tmp_path, clock, rules, 1)
    node.watched(0).is_program = True
    node.ranks[0].link.words[layout.MAGIC_AT] = 0
    node.wait(100_000)
    assert len(node.stalled) == found
