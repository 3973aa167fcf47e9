"""Ranks agree by connections of their own, or by gloo's messages.

The ranks are threads, each with a gloo group of its own.
"""

import itertools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest
import torch.distributed as dist

from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.numerics import rank_links
from trainer_sdk.numerics.agreement import _Hop
from trainer_sdk.numerics.rank_links import ByteLink, RankAlarm, linked

Result = TypeVar("Result")
LIMIT = timedelta(seconds=30)
CLOSED = "Connection closed by peer: rank 0 "


def on_ranks(size: int, act: Callable[[Any, RankGroup], Result]) -> list[Result]:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> Result:
        group: Any = dist.ProcessGroupGloo(store, rank, size, LIMIT)
        return act(group, RankGroup(group))

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))


def distances(size: int) -> list[int]:
    return [1 << hop for hop in range((size - 1).bit_length())]


def told(links: Any, own: int) -> int:
    for link in links:
        own |= link.passed_on(own)
    return own


@pytest.fixture(params=["one node", "two nodes"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one node, which share its address, or of two."""
    hosts = itertools.cycle(["127.0.0.1", "127.0.0.2"][: 1 + (request.param == "two nodes")])
    monkeypatch.setattr(rank_links, "_own_host", lambda: next(hosts))


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_hears_of_all_others(size: int) -> None:
    def act(group: Any, ranks: RankGroup) -> list[int]:
        links = linked(ranks, distances(size), LIMIT.total_seconds())
        assert links
        return [told(links, 1 << ranks.rank), told(links, 0), told(links, ranks.rank == 1)]

    assert on_ranks(size, act) == [[(1 << size) - 1, 0, 1]] * size


def test_values_are_gathered_whole_and_short_ones_in_one_step() -> None:
    """Each step waits for all ranks, and a lost rank's successor waits for a gathering."""

    class Counting(RankGroup):
        steps = 0

        def _all(self, own: Any) -> Any:
            self.steps += 1
            return super()._all(own)

    def act(group: Any, ranks: RankGroup) -> list[Any]:
        counting = Counting(group)
        gathered = [
            counting.gather(text * ranks.rank, str) for text in ("é", "x" * 1022, "x" * 1023)
        ]
        return [gathered, counting.steps]

    texts = [["", "é"], ["", "x" * 1022], ["", "x" * 1023]]
    assert on_ranks(2, act) == [[texts, 1 + 1 + 2]] * 2


def test_by_gloo_too() -> None:
    def act(group: Any, ranks: RankGroup) -> list[int]:
        links = [_Hop(group, ranks, far) for far in distances(3)]
        return [told(links, 1 << ranks.rank), told(links, 0)]

    assert on_ranks(3, act) == [[7, 0]] * 3


def test_no_rank_has_links_if_another_rank_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    own_host = rank_links._own_host
    threads: set[int] = set()

    def host() -> str:
        threads.add(threading.get_ident())
        if len(threads) == 1:
            raise OSError
        return own_host()

    monkeypatch.setattr(rank_links, "_own_host", host)
    assert on_ranks(3, lambda _, ranks: linked(ranks, distances(3), 1.0)) == [[]] * 3


@pytest.mark.usefixtures("nodes")
def test_a_stranger_is_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = rank_links._connected
    strangers = []

    def after_strangers(*asked: Any) -> socket.socket:
        for token in ("", bytes(16).hex()):
            stranger = connected(msgspec.structs.replace(asked[0], token=token), *asked[1:])
            with suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        return connected(*asked)

    monkeypatch.setattr(rank_links, "_connected", after_strangers)

    def act(group: Any, ranks: RankGroup) -> int:
        return told(linked(ranks, [1], LIMIT.total_seconds()), ranks.rank)

    assert on_ranks(2, act) == [1, 1]
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_is_gone_is_named() -> None:
    def act(group: Any, ranks: RankGroup) -> list[ByteLink]:
        return linked(ranks, [1], LIMIT.total_seconds())

    first, second = on_ranks(2, act)
    first.clear()
    with pytest.raises(ConnectionError, match=CLOSED):
        told(second, 0)


def test_a_rank_that_does_not_decide_is_waited_for_as_long_as_by_a_collective() -> None:
    (links, _) = on_ranks(2, lambda _, ranks: linked(ranks, [1], 0.01))
    with pytest.raises(TimeoutError, match="Timed out waiting 10ms for recv of the decision"):
        told(links, 0)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("callers", [{1: 3}, {0: 3, 1: 3}, {0: 3, 1: 5}])
def test_all_ranks_decide_in_the_step_after_a_call(size: int, callers: dict[int, int]) -> None:
    """The barrier stands for the gradients, for which the ranks of a training wait in each step."""
    gradients = threading.Barrier(size)

    def act(_: Any, ranks: RankGroup) -> list[int]:
        alarm = RankAlarm(linked(ranks, distances(size), LIMIT.total_seconds()), 30.0)
        due = []
        for turn in range(1, 9):
            gradients.wait()
            alarm.turn = turn
            if alarm.is_called and alarm.is_due():
                due.append(turn)
            if callers.get(ranks.rank) == turn:
                alarm.call()
        gradients.wait()
        alarm.close()
        return due

    assert on_ranks(size, act) == [sorted({turn + 1 for turn in callers.values()})] * size


def test_ranks_that_do_not_wait_for_each_other_decide_in_the_same_step() -> None:
    done = threading.Barrier(3)

    def act(_: Any, ranks: RankGroup) -> list[int]:
        alarm = RankAlarm(linked(ranks, distances(3), LIMIT.total_seconds()), 30.0)
        dice = Random(ranks.rank)
        due: list[int] = []
        while len(due) < 20:
            alarm.turn += 1
            if alarm.is_called and alarm.is_due():
                due.append(alarm.turn)
                done.wait()  # as they do who decide together
            if dice.random() < 0.01:
                alarm.call()
        done.wait()
        alarm.close()
        return due

    first, *others = on_ranks(3, act)
    assert others == [first] * 2


def test_a_call_that_a_rank_does_not_hear_any_more_is_an_error() -> None:
    def act(_: Any, ranks: RankGroup) -> RankAlarm:
        return RankAlarm(linked(ranks, [1], LIMIT.total_seconds()), 30.0)

    first, second = on_ranks(2, act)
    first.close()
    with pytest.raises(ConnectionError, match=CLOSED):
        second.call()
    second.close()
