"""What an agent concludes from ranks that it did not start; without a process."""

import pytest

from everstep_services.agent.attached.attendance import (
    Act,
    Attendance,
    IncidentCloses,
    IncidentOpens,
    JobOver,
    RoundBegins,
    RoundEnds,
)
from everstep_services.agent.core.exit import RankExit

GOOD = RankExit(code=0)
BAD = RankExit(code=3)
STOPPED = RankExit(signal="SIGTERM")
UNSEEN = RankExit()


class World:
    """Two ranks of a launcher that may start them once again."""

    def __init__(self, expected: int = 2, max_restarts: int = 1) -> None:
        self.now = 100.0
        self.here = Attendance(expected, max_restarts, 10.0, self.now)

    def round(self, number: int) -> list[Act]:
        return [
            act
            for rank in range(2)
            for act in self.here.came(number, rank, 10 * number + rank, self.now)
        ]

    def gone(self, **endings: RankExit) -> list[Act]:
        return [
            act
            for rank, ending in endings.items()
            for act in self.here.gone(int(rank[1:]), ending, f"fact-{rank}", self.now)
        ]

    def is_over(self, *, launcher_lives: bool = True) -> bool:
        return self.here.is_over(self.now, launcher_lives=launcher_lives)


def test_a_good_end_is_over_at_once() -> None:
    world = World()
    assert world.round(1) == [RoundBegins(1)]
    assert not world.is_over()
    world.now += 5
    assert world.gone(r0=GOOD, r1=GOOD) == [
        RoundEnds(1, "done", "all ranks have ended well", None, None, 5.0)
    ]
    assert world.is_over()
    (over,) = world.here.over(world.now)
    assert isinstance(over, JobOver)
    assert (over.state, over.exit_code) == ("done", 0)


def test_the_first_failure_opens_one_incident_and_the_next_first_step_closes_it() -> None:
    world = World()
    world.round(1)
    opens, ends = world.gone(r1=BAD, r0=STOPPED)
    assert opens == IncidentOpens(1, "rank 1 exited with 3", "fact-r1")
    assert isinstance(ends, RoundEnds)
    assert (ends.cause, ends.rank, ends.fact) == ("rank_exited", 1, "fact-r1")
    world.now += 60
    assert not world.is_over(), "the launcher may bring them back, however long it takes"
    assert world.round(2) == [RoundBegins(2)]
    world.now += 2
    (closes,) = world.here.stepped(world.now)
    assert isinstance(closes, IncidentCloses)
    assert (closes.outcome, closes.next_round) == ("recovered", 2)
    assert closes.reason == "rank 1 exited with 3; round 2 makes steps again"
    assert (closes.ledger.start_s, closes.ledger.wall_s) == (60, 62)
    assert world.here.stepped(world.now) == []


def test_a_stall_is_an_incident_until_its_ranks_move() -> None:
    """Nothing ends; a rank that fails meanwhile is of the same incident (A4.4)."""
    world = World()
    world.round(1)
    assert world.here.moves(world.now) == []
    stalled = IncidentOpens(1, "rank 1 stands still", "f1", "rank_stalled", 8.0)
    assert world.here.stalled(1, "rank 1 stands still", "f1", world.now, 8.0) == [stalled]
    assert world.here.stalled(0, "rank 0, too", "f2", world.now, 9.0) == []
    world.now += 3
    (closes,) = world.here.moves(world.now)
    assert isinstance(closes, IncidentCloses)
    assert (closes.outcome, closes.next_round, closes.lost_steps) == ("recovered", 1, 0)
    assert closes.reason == "rank 1 stands still; all ranks make progress again"
    assert (closes.ledger.detect_s, closes.ledger.wall_s) == (8, 11), "from the last progress on"

    world.here.stalled(1, "rank 1 stands still", "f3", world.now, 8.0)
    (ends,) = world.gone(r1=BAD, r0=STOPPED)
    assert isinstance(ends, RoundEnds)
    assert world.here.moves(world.now) == [], "a rank has failed since"
    world.round(2)
    (closes,) = world.here.stepped(world.now)
    assert isinstance(closes, IncidentCloses)
    assert (closes.next_round, closes.lost_steps) == (2, None)
    assert closes.reason == "rank 1 stands still; round 2 makes steps again"
    assert closes.ledger.detect_s == 8


def test_a_stall_that_ends_well_has_recovered() -> None:
    world = World()
    world.round(1)
    world.here.stalled(1, "rank 1 stands still", "f1", world.now)
    world.gone(r0=GOOD, r1=GOOD)
    closes, over = world.here.over(world.now)
    assert isinstance(closes, IncidentCloses)
    assert isinstance(over, JobOver)
    assert (closes.outcome, over.state) == ("recovered", "done")


def test_a_failure_has_recovered_if_the_next_round_ends_well_without_a_step() -> None:
    """The session counts no steps; what followed is known only at the end."""
    world = World()
    world.round(1)
    world.gone(r1=BAD, r0=STOPPED)
    world.now += 4
    world.round(2)
    world.now += 30
    world.gone(r0=GOOD, r1=GOOD)
    closes, over = world.here.over(world.now)
    assert isinstance(closes, IncidentCloses)
    assert isinstance(over, JobOver)
    assert (closes.outcome, closes.next_round, over.state) == ("recovered", 2, "done")
    followed = "round 2 followed, and all ranks that were watched have ended well"
    assert closes.reason == f"rank 1 exited with 3; {followed}"
    ledger = closes.ledger
    assert (ledger.start_s, ledger.first_step_s, ledger.other_s, ledger.wall_s) == (4, 0, 30, 34)


def test_failures_before_the_next_step_belong_to_the_open_incident() -> None:
    world = World()
    world.round(1)
    world.gone(r1=BAD, r0=STOPPED)
    world.round(2)
    acts = world.gone(r0=BAD, r1=STOPPED)
    assert [type(act) for act in acts] == [RoundEnds]
    assert world.is_over(), "no restart is left"
    closes, over = world.here.over(world.now)
    assert isinstance(closes, IncidentCloses)
    assert isinstance(over, JobOver)
    assert (closes.outcome, over.state, over.exit_code) == ("failed", "failed", 3)


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_of_an_older_round_are_nothing(number: int) -> None:
    world = World()
    world.round(2)
    assert world.here.is_news(number, 0, 999) is (number == 2)
    assert not world.here.is_news(2, 0, 20), "it is known"


def test_a_round_that_was_overtaken_ends() -> None:
    world = World()
    world.round(1)
    ends, begins = world.here.came(2, 0, 20, world.now)
    assert isinstance(ends, RoundEnds)
    assert (ends.round, begins) == (1, RoundBegins(2))
    assert "still here" in ends.reason


def test_what_nobody_saw_is_not_called_good() -> None:
    world = World(max_restarts=0)
    world.round(1)
    world.gone(r0=GOOD, r1=UNSEEN)
    (over,) = world.here.over(world.now)
    assert isinstance(over, JobOver)
    assert (over.state, over.exit_code) == ("unknown", None)


def test_a_launcher_that_is_gone_brings_nobody_back() -> None:
    world = World()
    world.round(1)
    world.gone(r0=BAD, r1=STOPPED)
    world.now += 9.9
    assert not world.is_over(launcher_lives=False)
    world.now += 0.2
    assert world.is_over(launcher_lives=False)


def test_ranks_may_come_late() -> None:
    world = World(expected=3)
    world.round(1)
    world.gone(r0=GOOD, r1=GOOD)
    assert not world.is_over(), "one has not come yet"
    world.now += 10
    assert world.is_over()


def test_where_no_rank_comes_nothing_is_said() -> None:
    world = World()
    assert not world.is_over()
    world.now += 10
    assert world.is_over()
    assert world.here.over(world.now) == []


def test_ranks_that_go_on_in_their_processes_without_a_lost_one_have_recovered() -> None:
    world = World()
    world.round(1)
    (opens,) = world.gone(r1=RankExit(signal="SIGKILL"))
    assert isinstance(opens, IncidentOpens)
    world.now += 2
    (closes,) = world.here.went_on((1,), world.now)
    assert isinstance(closes, IncidentCloses)
    assert (closes.outcome, closes.ledger.wall_s) == ("recovered", 2.0)
    assert "restarted in their processes without it" in closes.reason
    assert world.here.went_on((1,), world.now) == [], "each of them tells it"
    (ends,) = world.gone(r0=GOOD)
    assert isinstance(ends, RoundEnds)
    assert ends.cause == "done"
    (over,) = world.here.over(world.now)
    assert isinstance(over, JobOver)
    assert (over.state, over.exit_code) == ("done", 0)
    assert "but rank 1" in over.reason


def test_ranks_may_go_on_before_the_end_of_the_lost_one_is_seen() -> None:
    world = World()
    world.round(1)
    assert world.here.went_on((1,), world.now) == []
    opens, closes = world.gone(r1=RankExit(signal="SIGKILL"))
    assert isinstance(opens, IncidentOpens)
    assert isinstance(closes, IncidentCloses)
    assert closes.outcome == "recovered"
    again, _ = world.gone(r0=BAD)
    assert isinstance(again, IncidentOpens), "nobody goes on without this one"


def test_a_rank_that_fails_after_the_others_went_on_without_one_is_a_failure() -> None:
    world = World(max_restarts=0)
    world.round(1)
    world.gone(r1=RankExit(signal="SIGKILL"))
    world.here.went_on((1,), world.now)
    opens = world.gone(r0=BAD)[0]
    assert isinstance(opens, IncidentOpens)
    over = world.here.over(world.now)[-1]
    assert isinstance(over, JobOver)
    assert (over.state, over.reason) == ("failed", "rank 0 exited with 3; no other round followed")
