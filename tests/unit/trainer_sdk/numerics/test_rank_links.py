"""A byte goes from rank to rank by connections of their own, or by gloo's messages.

The ranks are threads, each with a gloo group of its own.
"""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.numerics import rank_links
from trainer_sdk.numerics.agreement import RankAgreement, _Hop
from trainer_sdk.numerics.rank_links import ByteLink, linked

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


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_hears_of_all_others(size: int) -> None:
    def act(group: Any, ranks: RankGroup) -> list[int]:
        links = linked(ranks, distances(size), LIMIT.total_seconds())
        assert links
        return [told(links, 1 << ranks.rank), told(links, 0), told(links, ranks.rank == 1)]

    assert on_ranks(size, act) == [[(1 << size) - 1, 0, 1]] * size


def test_a_rank_alone_hears_of_itself_a_step_later() -> None:
    agreement = RankAgreement()
    assert [agreement.exchanged(own) for own in (1, 2, 0, 0)] == [0, 1, 2, 0]


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


def test_a_stranger_is_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = rank_links._connected
    strangers = []

    def after_strangers(address: rank_links.RankAddress, number: int) -> socket.socket:
        for octets in (b"", bytes(17)):
            stranger = socket.create_connection((address.host, address.port))
            stranger.sendall(octets)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        return connected(address, number)

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
