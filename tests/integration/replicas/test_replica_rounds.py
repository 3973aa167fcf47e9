"""Keepers of a training that was sent back: what it goes on from is never the first to leave."""

import asyncio
from pathlib import Path

import pytest

from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.protocol import Copy, ReplicaError
from tests.integration.replicas.nodes import JOB, Node, made, order, running, save_image, state_of
from trainer_sdk.checkpoint.image_folder import RestoredState, mark_restored
from trainer_sdk.checkpoint.manifest import Identity, encode


def goes_back(node: Node, rank: int, *, to: int, round: int) -> None:
    """As the rank does when it has restored that step, of round 1."""
    identity = Identity(job=JOB, round=1, step=to, world_size=8, layout="l")
    folder = node.folder / "own" / f"rank-{rank}"
    mark_restored(folder, RestoredState(identity=identity, round=round))


async def test_the_next_state_takes_the_place_of_what_the_training_has_left(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        for buffer, step in (("a", 10), ("b", 20)):
            one.save(0, step, buffer=buffer)
            await other.has_held(0, 0, step)
        goes_back(one, 0, to=10, round=2)
        one.keep.begins(order(0, round=2, peers=[other.peer(1)]))
        one.save(0, 11, buffer="b", round=2)
        await other.has_held(0, 0, 11)
    assert sorted(other.held(0, 0)) == [10, 11]


async def test_who_holds_only_what_was_left_is_sent_what_the_training_goes_on_from(
    tmp_path: Path,
) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.save(0, 20, buffer="b")
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        await other.has_held(0, 0, 20)
        save_image(one.folder, 0, 10, buffer="a")
        goes_back(one, 0, to=10, round=2)
        one.keep.begins(order(0, round=2, peers=[other.peer(1)]))
        one.keep.look()
        await other.has_held(0, 0, 10)
        new = made("new", tmp_path / "new")  # in the place of the one, before it has saved again
        async with running([new]):
            new.keep.begins(order(0, round=3, sources=[other.peer(1)]))
            offer = await new.has_offer(3)
    assert offer.complete
    assert new.held(0, 0) == {10: state_of(0, 10)}


async def test_a_node_of_an_older_round_is_refused_by_who_has_not_heard_of_the_newer_one(
    tmp_path: Path,
) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    stale = made("stale", tmp_path / "stale")
    late = save_image(stale.folder, 0, 30)
    copy = Copy(
        slot=0, rank=0, ranks=1, step=30, size_bytes=late.size_bytes, hash=late.hash,
        index=encode(late),
    )  # fmt: skip
    async with running([one, other]):
        other.keep.begins(order(1))
        one.save(0, 11, round=2)
        one.keep.begins(order(0, round=2, peers=[other.peer(1)]))
        await other.has_held(0, 0, 11)
        stale.standing.order = order(0, round=1)

        def put() -> None:
            with Call(other.peer(1), stale.standing) as call:
                call.put(copy, memoryview(state_of(0, 30)))

        with pytest.raises(ReplicaError, match="round 1 is over"):
            await asyncio.to_thread(put)
    assert sorted(other.held(0, 0)) == [11]
