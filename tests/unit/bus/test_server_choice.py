"""When a connection moves to another server."""

import random

import pytest

from everstep.bus.server.choice import Move, ServerChoice

ALL = ("a:1", "b:1", "c:1")


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> ServerChoice:
    """With three servers in the settings; each client is among those that return."""
    monkeypatch.setattr(random, "random", lambda: 0.0)
    return ServerChoice(3, writes_within_s=10.0, jitter_s=1.0)


def reason(move: Move | None) -> str:
    return "" if move is None else move.reason


def test_a_server_alone_is_left_also_if_it_is_the_first(choice: ServerChoice) -> None:
    assert reason(choice.reported(["a:1"], 0, is_first=True)) == "it reaches 1 of 3 servers"


def test_a_server_with_the_majority_is_not_left(choice: ServerChoice) -> None:
    choice.reported(ALL, 0, is_first=True)
    assert choice.reported(ALL[:2], 1, is_first=False) is None


def test_nobody_goes_round_in_circles_while_most_servers_are_away(choice: ServerChoice) -> None:
    choice.reported(ALL, 0, is_first=True)
    assert choice.reported(["a:1"], 1, is_first=False) is not None
    for now in range(2, 300):
        assert choice.reported(["a:1"], now, is_first=now % 2 == 0) is None


def test_a_single_server_reports_no_addresses(choice: ServerChoice) -> None:
    assert choice.reported([], 0, is_first=True) is None
    assert choice.reported([], 1, is_first=False) is None


def test_a_server_that_comes_back_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = 0
    for number in range(300):
        choice = ServerChoice(3, writes_within_s=10.0, jitter_s=1.0)
        monkeypatch.setattr(random, "random", lambda number=number: number / 300)
        choice.reported(ALL[:2], 0, is_first=True)
        move = choice.reported(ALL, 1, is_first=False)
        if move is not None:
            assert move.to == "c:1"
            moves += 1
    assert moves == 100


def test_the_others_have_not_come_back_to_a_server_that_finds_them(choice: ServerChoice) -> None:
    choice.reported(ALL[:2], 0, is_first=True)
    move = choice.reported(ALL, 1, is_first=False)
    assert move is not None
    arrived = 1 + move.after_s
    assert choice.reported(["a:1", "c:1"], arrived, is_first=True) is None
    assert choice.reported(ALL, arrived + 1, is_first=False) is None


def test_a_new_connection_is_no_reason_to_move_on(choice: ServerChoice) -> None:
    choice.reported(ALL[:2], 0, is_first=True)
    assert choice.reported(ALL, 1, is_first=True) is None


def test_writes_that_nobody_acknowledges_are_a_reason_after_a_while(choice: ServerChoice) -> None:
    assert choice.unanswered(sent_at=0, now=5) is None
    assert choice.unanswered(sent_at=5, now=9.9) is None
    assert reason(choice.unanswered(9, 10)) == "no write was acknowledged for 10 s"
    # There is another chance for each server, but not all the time.
    assert choice.unanswered(10, 19.9) is None
    assert choice.unanswered(19, 20) is not None
    assert choice.unanswered(20, 39.9) is None
    assert choice.unanswered(39, 40) is not None


def test_one_acknowledgement_ends_the_wait(choice: ServerChoice) -> None:
    choice.unanswered(sent_at=0, now=9)
    choice.acknowledged()
    assert choice.unanswered(sent_at=9, now=12) is None


def test_writes_fail_for_as_long_as_some_are_tried(choice: ServerChoice) -> None:
    """A replica whose last write failed, and that has nothing to write since, knows nothing."""
    choice.unanswered(100, 105)
    assert choice.silent_s(150) == 5
    choice.unanswered(140, 145)
    assert choice.silent_s(150) == 45
    assert choice.silent_s(300) == 0
    choice.acknowledged()
    assert choice.silent_s(301) == 0
