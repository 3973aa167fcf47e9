"""Who has stalled: limits by phase, pauses, excuses, blindness."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.messages import LimitsDocument, SectionLimit
from everstep_services.agent.stalls.judge import Excused, Moving, Stalled, StallJudge
from everstep_services.agent.stalls.limits import LimitRules, StallLimits
from everstep_services.agent.stalls.limits_table import (
    ExternalLimits,
    external_limits,
    misorders,
    table,
)
from everstep_services.agent.stalls.rank_view import ActivitySigns
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages, limits_of
from trainer_sdk import layout


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class Node:
    """Some ranks and their judge, looked at whenever it wants to be."""

    def __init__(self, folder: Path, clock: Clock, limits: StallLimits, ranks: int = 2) -> None:
        self.clock = clock
        self.ranks = [StallRank(folder, rank, clock) for rank in range(ranks)]
        self.judge = StallJudge(limits, clock.now)
        self.news: list[Stalled | Moving | Excused] = []

    def look(self) -> list[Stalled | Moving | Excused]:
        found = self.judge.look([rank.view() for rank in self.ranks], self.clock.now)
        self.news += found
        return found

    def wait(self, seconds: float) -> list[Stalled | Moving | Excused]:
        """Let time pass, looking exactly when the judge asks for it."""
        end, found = self.clock.now + seconds, self.look()
        while self.judge.wake_at < end:
            self.clock.now = self.judge.wake_at
            found = found + self.look()
        self.clock.now = end
        return found + self.look()

    @property
    def stalled(self) -> list[int]:
        return [one.place.rank for one in self.news if isinstance(one, Stalled)]


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> Node:
    made = Node(tmp_path, clock, limits_of(data=30, forward=60, outside=20))
    for rank in made.ranks:
        rank.run.step()
    return made


def test_a_rank_stalls_at_its_limit_and_not_before(node: Node) -> None:
    for rank in node.ranks:
        rank.run.begin("data")
    assert node.wait(29.9) == []
    stalled = node.wait(0.1)
    assert [one.place.rank for one in stalled if isinstance(one, Stalled)] == [0, 1]
    first = stalled[0]
    assert isinstance(first, Stalled)
    assert (first.place.section, first.place.limit.s, first.place.limit.source) == (
        "data",
        30,
        "configured",
    )
    assert first.waited_s == pytest.approx(30)


def test_a_stall_is_said_once_and_another_one_again(node: Node) -> None:
    """A rank that stalls, moves and stalls again is found twice (A3.4)."""
    run = node.ranks[0].run
    node.ranks[1].run.pause()
    node.ranks[1].run.resume()
    run.begin("data")
    node.ranks[1].run.begin("data")
    assert len(node.wait(100)) == 2
    run.end("data")
    moving = node.wait(1)
    assert [one.stalled_s for one in moving if isinstance(one, Moving)] == [pytest.approx(100)]
    run.begin("data")
    again = node.wait(31)
    assert [type(one) for one in again] == [Stalled]


def test_a_rank_that_is_no_longer_looked_at_does_not_move_again(node: Node) -> None:
    for rank in node.ranks:
        rank.run.begin("data")
    assert len(node.wait(31)) == 2
    gone = node.ranks.pop()
    assert node.wait(10) == []
    gone.run.end("data")
    node.ranks[0].run.end("data")
    assert [one.stalled.place.rank for one in node.wait(1) if isinstance(one, Moving)] == [0]


def test_a_paused_rank_is_never_judged_and_excuses_who_waits_for_it(node: Node) -> None:
    """A pause for a debugger is not a stall, however long it is (A3.1)."""
    node.ranks[0].run.pause()
    node.ranks[1].run.begin("data")
    news = node.wait(20_000)
    assert [type(one) for one in news] == [Excused]
    node.ranks[0].run.resume()
    node.wait(19)  # what it was waited for may come now
    assert node.stalled == []
    node.wait(2)
    assert node.stalled == [1, 0]


def test_a_pause_ends_by_itself(node: Node) -> None:
    node.ranks[0].run.pause(for_s=500)
    node.ranks[1].run.pause(for_s=500)
    assert node.wait(500) == []
    assert node.wait(19) == []
    node.wait(2)
    assert sorted(node.stalled) == [0, 1]


def test_who_waits_for_a_rank_in_evaluation_has_not_stalled(node: Node) -> None:
    with node.ranks[0].run.section("evaluation"):
        node.ranks[1].run.begin("forward")
        news = node.wait(2400)
    assert [type(one) for one in news] == [Excused]
    assert isinstance(news[0], Excused)
    assert news[0].by == 0


def test_who_stopped_first_is_not_excused_by_those_that_wait_for_it(node: Node) -> None:
    node.ranks[0].run.begin("data")  # 30 s
    node.wait(0.01)
    node.ranks[1].run.begin("forward")  # 60 s, waits for the other
    node.wait(30)
    assert node.stalled == [0]


def test_a_rank_that_a_signal_holds_is_excused_by_nobody(node: Node) -> None:
    """Rank 0 waits for it, and has stopped before it entered its section."""
    node.judge.is_stopped = lambda place: place.rank == 1
    node.ranks[0].run.begin("forward")  # 60 s
    node.wait(2)
    node.ranks[1].run.begin("data")  # 30 s
    node.wait(30)
    assert node.stalled == [1]


def test_a_rank_in_a_long_phase_excuses_those_that_waited_before_it_began(node: Node) -> None:
    node.ranks[1].run.begin("forward")
    node.wait(1)
    with node.ranks[0].run.section("checkpoint"):
        node.wait(600)
    assert node.stalled == []


def test_who_waits_for_a_rank_that_works_on_without_saying_for_what(node: Node) -> None:
    node.ranks[1].run.begin("forward")
    for _ in range(500):
        with node.ranks[0].run.section("data"):
            node.wait(5)
    assert node.stalled == []


def test_the_rank_that_stopped_first_is_named_when_its_time_is_over(node: Node) -> None:
    node.ranks[0].run.begin("forward")  # 60 s
    node.wait(2)
    node.ranks[1].run.begin("data")  # 30 s, waits for the other
    assert [type(one) for one in node.wait(40)] == [Excused]
    node.wait(20)
    assert node.stalled == [0, 1]


def test_of_ranks_late_together_the_one_a_step_behind_is_named_first(node: Node) -> None:
    """It stopped a moment later, before the end of a step that the other has made (A3.2)."""
    node.ranks[0].run.step()
    node.ranks[0].run.begin("forward")  # 60 s, waits for the other
    node.wait(2)
    node.ranks[1].run.begin("data")  # 30 s
    assert [type(one) for one in node.wait(40)] == [Excused]
    node.wait(20)
    assert node.stalled == [1, 0]


def test_a_rank_stalls_while_others_step_on_without_it(node: Node) -> None:
    node.ranks[0].run.begin("data")
    for _ in range(20):
        node.ranks[1].run.step()
        node.wait(5)
    assert node.stalled == [0]


def test_the_time_outside_of_sections_has_a_limit(node: Node) -> None:
    node.wait(19.9)
    assert node.news == []
    node.wait(0.2)
    assert sorted(node.stalled) == [0, 1]


def test_heartbeats_are_progress(node: Node) -> None:
    for _ in range(20):
        for rank in node.ranks:
            rank.run.heartbeat()
        node.wait(15)
    assert node.news == []


def test_our_own_absence_is_nobodys_stall(node: Node) -> None:
    """After SIGSTOP and SIGCONT of agent and ranks nobody has stalled (A3.1)."""
    for rank in node.ranks:
        rank.run.begin("data")
    node.wait(5)
    node.clock.now += 3600  # this agent and its ranks were stopped
    assert node.look() == []
    assert node.wait(19) == []
    node.wait(10)
    assert sorted(node.stalled) == [0, 1]


def test_a_rank_that_never_opens_its_page_is_judged(tmp_path: Path, clock: Clock) -> None:
    node = Node(tmp_path, clock, limits_of(first_step=100), ranks=1)
    node.ranks[0].link.words[layout.MAGIC_AT] = 0
    assert node.wait(99) == []
    assert [type(one) for one in node.wait(2)] == [Stalled]


def test_before_the_first_step_what_was_learned_for_later_means_nothing(
    tmp_path: Path, clock: Clock
) -> None:
    limits = limits_of(first_step=1000)
    data = SectionLimit(section="data", limit_s=120, source="floor")
    limits.learn(LimitsDocument(job="j", limits=(data,), first_step_limit_s=1200, reason=""))
    node = Node(tmp_path, clock, limits)
    for rank in node.ranks:
        rank.run.begin("data")
    assert node.wait(990) == []
    node.wait(20)
    assert sorted(node.stalled) == [0, 1]


def test_a_busy_rank_may_be_on_its_way_to_its_first_step(tmp_path: Path, clock: Clock) -> None:
    node = Node(tmp_path, clock, StallLimits(LimitRules()), ranks=1)
    assert node.ranks[0].run.steps_made == 0
    node.ranks[0].signs = ActivitySigns(idle_s=0.0)
    assert node.wait(7300) == []
    node.ranks[0].signs = ActivitySigns(idle_s=400.0)
    assert [type(one) for one in node.wait(1)] == [Stalled]


def test_a_script_without_sections_is_judged_by_its_steps_and_collectives(
    tmp_path: Path, clock: Clock
) -> None:
    node = Node(tmp_path, clock, limits_of(outside=100), ranks=1)
    words = node.ranks[0].link.words
    words[layout.PHASE] = layout.PHASE_SCRIPT
    words[layout.STEPS] = words[layout.STEP] = 5
    words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
    words[layout.PROGRESS_NS] = clock.ns()
    node.wait(90)
    node.ranks[0].signs = ActivitySigns(collective_s=clock.now)
    assert node.wait(99) == []
    (stalled,) = node.wait(2)
    assert isinstance(stalled, Stalled)
    assert stalled.place.signal == "collectives"


def test_learned_limits_apply_and_those_set_by_hand_win() -> None:
    limits = limits_of(data=7)
    limits.learn(
        LimitsDocument(
            job="j",
            limits=(
                SectionLimit(section="data", limit_s=120, source="learned"),
                SectionLimit(section="forward", limit_s=130, source="floor"),
            ),
            first_step_limit_s=1200,
            first_step_longest_s=240,
            reason="",
        )
    )
    from trainer_sdk.page_content import SectionKind

    assert limits.section("data", SectionKind.PLAIN).s == 7
    assert (limits.section("forward", SectionKind.PLAIN).s, limits.first_step().s) == (130, 1200)
    assert limits.section("other", SectionKind.CHECKPOINT).s == 7200
    assert limits.shortest_s() == 7
    limits.learn(None)
    assert limits.is_learning


def test_the_table_shows_every_limit_in_its_order() -> None:
    """The table has our limits, the process group's and the scheduler's (A3.6)."""
    limits = limits_of(data=90)
    others = ExternalLimits(600.0, None, 600.0, 30.0)
    rows = table(limits, others)
    assert [row.split()[0] for row in rows][:4] == ["first-step", "step", "outside", "data"]
    assert any("process group" in row and "10 min" in row for row in rows)
    (warning,) = warnings(limits, others)
    assert "--preempt-grace 600 is longer than the scheduler waits (30 s)" in warning


def test_an_agent_that_gives_no_grace_compares_none() -> None:
    others = ExternalLimits(preempt_grace_s=None, scheduler_grace_s=30.0)
    assert warnings(limits_of(data=90), others) == []
    rows = table(limits_of(), others)
    assert not any("when preempted" in row for row in rows)
    assert rows[-1].split() == [
        "the",
        "scheduler's",
        "grace",
        "30",
        "s",
        "[agent]",
        "scheduler_grace_s",
    ]


def warnings(limits: StallLimits, others: ExternalLimits) -> list[str]:
    return [found.text for found in misorders(limits, others) if found.is_warning]


def test_a_process_group_that_gives_up_first_is_warned_of() -> None:
    """The warning names the limit that is too long, and the option (A3.6)."""
    (warning,) = warnings(limits_of(data=90), ExternalLimits(60.0))
    assert "gives up after 1 min, before a stall in data is found (90 s, configured)" in warning
    assert warning.endswith("a longer timeout, or set --limit data=30")
    attached = ExternalLimits(60.0, preempt_grace_s=None, limited_by="EVERSTEP_AGENT__LIMITS=")
    (warning,) = warnings(limits_of(data=90), attached)
    assert warning.endswith("or set EVERSTEP_AGENT__LIMITS=data=30")
    (warning,) = warnings(limits_of(data=90), ExternalLimits(heartbeat_s=60.0))
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60" in warning


def test_a_default_past_which_a_process_group_gives_up_is_said_and_no_warning() -> None:
    """A default that comes too late is mentioned, without a warning (A3.6)."""
    (said,) = misorders(limits_of(), ExternalLimits(60.0))
    assert not said.is_warning
    assert "gives up after 1 min, before a stall is found (30 min, default)" in said.text
    (likely,) = misorders(limits_of(), ExternalLimits(has_nccl=True))
    assert "gives up after 10 min, unless the script says otherwise, before" in likely.text
    assert misorders(limits_of(), ExternalLimits()) == []  # gloo's 30 min are as long as ours
    assert misorders(limits_of(outside=300), ExternalLimits(has_nccl=True)) == []
    assert likely.text.endswith("--limit step=300 would find it first, once there are steps")
    assert misorders(limits_of(step=300), ExternalLimits(has_nccl=True)) == []


@pytest.mark.parametrize(
    ("environ", "has_nccl", "rows"),
    [
        ({}, False, ["process group 30 min torch's default with gloo"]),
        (
            {},
            True,
            [
                "process group 10 min torch's default with NCCL",
                "NCCL's monitor 8 min torch's default",
            ],
        ),
        (
            {"TORCH_NCCL_ENABLE_MONITORING": "0"},
            True,
            ["process group 10 min torch's default with NCCL"],
        ),
        (
            {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90"},
            True,
            [
                "process group 10 min torch's default with NCCL",
                "NCCL's monitor 90 s TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            ],
        ),
    ],
)
def test_the_table_shows_what_torch_does_where_nobody_says_otherwise(
    environ: dict[str, str], has_nccl: bool, rows: list[str]
) -> None:
    """The table has the defaults of torch and of NCCL's monitor (A3.6)."""
    others = external_limits(
        environ, preempt_grace_s=600, scheduler_grace_s=None, has_nccl=has_nccl
    )
    lines = [" ".join(line.split()) for line in table(StallLimits(LimitRules()), others)]
    assert lines[lines.index("evaluation 2 h default") + 1 : -1] == rows
