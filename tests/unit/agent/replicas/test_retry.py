"""Who breaks off is asked again while more comes; ranks are never told of an older round."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from everstep_services.agent.replicas.transfer import fetcher
from everstep_services.agent.replicas.transfer.fetcher import (
    OFFER,
    Attempt,
    Offer,
    Offers,
    TransferProgress,
    take_from_one,
)
from everstep_services.agent.replicas.transfer.protocol import ReplicaError


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_PAUSE_S", 0.0)
    monkeypatch.setattr(fetcher, "_STILL_MOST_S", 1e9)


class Source:
    """A node that says this to each attempt, and gives the state when it has said all."""

    def __init__(self, *causes: str) -> None:
        self.causes = list(causes)
        self.asked = 0

    async def take(self) -> None:
        self.asked += 1
        if self.causes:
            cause = self.causes.pop(0)
            raise ReplicaError(f"it was {cause}", cause)


def attempts(*sources: Source) -> Sequence[Attempt]:
    return [one.take for one in sources]


async def test_the_only_holder_may_pause() -> None:
    holder = Source("slow", "closed", "slow")
    await take_from_one(attempts(holder), TransferProgress())
    assert holder.asked == 4


async def test_another_holder_comes_before_a_second_attempt() -> None:
    paused, other = Source("slow"), Source()
    await take_from_one(attempts(paused, other), TransferProgress())
    assert (paused.asked, other.asked) == (1, 1)


async def test_who_is_gone_or_has_it_no_more_is_not_asked_again() -> None:
    gone, without, paused = Source("unreachable"), Source("unknown"), Source("slow", "slow", "torn")
    with pytest.raises(ReplicaError) as failed:
        await take_from_one(attempts(gone, without, paused), TransferProgress())
    assert (gone.asked, without.asked, paused.asked) == (1, 1, 3)
    assert str(failed.value) == "it was unreachable; it was unknown; it was slow; it was torn"


async def test_nobody_waits_for_what_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_STILL_MOST_S", 10.0)
    now, coming, source = 1000.0, TransferProgress(), Source(*["slow"] * 9)
    offsets = [100, 200, 200, 200]

    async def take() -> None:
        nonlocal now
        now += 7.0
        coming.reached(offsets.pop(0))
        await source.take()

    monkeypatch.setattr(fetcher, "monotonic", lambda: now)
    with pytest.raises(ReplicaError):
        await take_from_one([take], coming)
    assert source.asked == 4


def test_an_offer_of_a_round_before_is_not_written_over_the_present_one(tmp_path: Path) -> None:
    offers = Offers(tmp_path)
    for number in (3, 2):  # its thread was late
        offers.write(Offer(round=number, complete=True, reason=""))
    assert msgspec.json.decode((tmp_path / OFFER).read_bytes(), type=Offer).round == 3
    offers.write(Offer(round=4, complete=True, reason=""))
    assert msgspec.json.decode((tmp_path / OFFER).read_bytes(), type=Offer).round == 4
