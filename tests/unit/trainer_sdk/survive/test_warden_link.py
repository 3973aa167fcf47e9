"""The warden ends a round and begins the next over a real socket."""

import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from tests.waiting import WITHIN_S
from trainer_sdk.survive.warden_link import WardenGoneError, WardenLink
from trainer_sdk.wire import Channel, FromSurvivor, GoOn, Park, Parked, Survives

ORDER = GoOn(round=2, rank=3, environ={}, stdout="out", stderr="err")


class Warden:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "survive")
        self.aborted = Event()
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self.path)
            door.listen()
            self.rank = WardenLink(self.path, 2.0, self.aborted.set)
            wire, _ = door.accept()
        wire.settimeout(WITHIN_S)
        self.channel: Channel[FromSurvivor] = Channel(wire, FromSurvivor)


@pytest.fixture
def warden(tmp_path: Path) -> Iterator[Warden]:
    made = Warden(tmp_path)
    yield made
    made.rank.close()
    made.channel.close()


def test_a_rank_is_parked_and_goes_on(warden: Warden) -> None:
    rank = warden.rank
    assert warden.channel.receive() == [Survives(park_within_s=2.0)]
    warden.channel.send(Park(round=1))
    assert rank.await_park(WITHIN_S)
    assert warden.aborted.wait(WITHIN_S)
    rank.leave()
    warden.aborted.clear()
    rank.park(12, is_torn=True)
    assert warden.channel.receive() == [Parked(step=12, is_torn=True)]
    warden.channel.send(ORDER)
    assert rank.next_order() == ORDER
    assert not rank.is_over
    assert not warden.aborted.is_set(), "nothing is aborted once the training has left"


def test_a_rank_finishes_its_step_where_nothing_has_failed(warden: Warden) -> None:
    rank, asked, may_go = warden.rank, Event(), Event()

    def step_s() -> float:
        asked.set()
        assert may_go.wait(WITHIN_S)
        return 0.01

    rank.step_s = step_s
    warden.channel.send(Park(round=1, is_planned=True))
    assert asked.wait(WITHIN_S)
    assert (rank.ends_soon, rank.is_over, warden.aborted.is_set()) == (True, False, False)
    may_go.set()
    assert rank.await_park(WITHIN_S), "others may have left: it is freed"
    assert warden.aborted.wait(WITHIN_S)
    rank.leave()
    warden.channel.send(ORDER)
    assert rank.next_order() == ORDER
    assert (rank.ends_soon, rank.is_over) == (False, False)


def test_a_round_that_fails_before_its_order_is_taken_is_over(warden: Warden) -> None:
    rank = warden.rank
    warden.channel.send(Park(round=1))
    assert rank.await_park(WITHIN_S)
    rank.leave()
    warden.channel.send(ORDER)
    warden.channel.send(Park(round=2))
    assert warden.aborted.wait(WITHIN_S)
    warden.aborted.clear()
    assert rank.next_order() == ORDER
    assert warden.aborted.wait(WITHIN_S), "groups of the new round are aborted, too"
    assert rank.is_over


def test_without_the_warden_a_parked_rank_ends(warden: Warden) -> None:
    warden.channel.send(Park(round=1))
    assert warden.rank.await_park(WITHIN_S)
    warden.rank.leave()
    warden.channel.close()
    with pytest.raises(WardenGoneError):
        warden.rank.next_order()


def test_a_rank_whose_warden_is_gone_waits_for_nothing(warden: Warden) -> None:
    warden.channel.close()
    assert not warden.rank.await_park(3600.0)
