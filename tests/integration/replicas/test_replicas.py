"""States in the memory of other nodes: sent, held, fetched, and refused when they are not right."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import CopyReplica, Peer, ReleaseImages
from everstep_services.agent.replicas.images import OwnImages
from everstep_services.agent.replicas.store import Incoming
from everstep_services.agent.replicas.transfer import protocol
from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.protocol import GetCopy, ReplicaError, ReplicaLink
from everstep_services.agent.replicas.transfer.server import ReplicaServer
from everstep_services.rendezvous.domain.replica_placement import Cliques, ReplicaSlot, cliques
from tests.integration.replicas.nodes import (
    JOB,
    PATIENT,
    SIZE,
    Node,
    made,
    order,
    running,
    state_of,
)
from tests.waiting import until_async
from trainer_sdk.checkpoint.image_folder import mark_image
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark


async def test_a_state_is_sent_to_its_keeper_and_fetched_from_there(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1, peers=[one.peer(0)]))
        one.save(0, 10)
        assert await other.has_held(0, 0, 10) == state_of(0, 10)
        await until_async(lambda: other.stored, "the holder reports it")
        new = made("new", tmp_path / "new")
        async with running([new]):
            new.keep.begins(order(0, round=2, sources=[other.peer(1)]))
            offer = await new.has_offer(2)
    assert (offer.complete, offer.reason) == (True, "step 10 was fetched from other nodes")
    assert new.held(0, 0) == {10: state_of(0, 10)}
    assert other.stored[0].copy.step == 10


async def test_the_two_newest_steps_are_held_and_their_memory_is_used_again(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        files = set()
        for number, step in enumerate((10, 20, 30, 40)):
            one.save(0, step, buffer="ab"[number % 2])
            assert await other.has_held(0, 0, step) == state_of(0, step)
            (place,) = (other.folder / "held").glob(f"slot-0/rank-0/{step}-*/image")
            files.add(place.stat().st_ino)
    assert sorted(other.held(0, 0)) == [30, 40]
    assert len(files) == 2
    assert other.store.size_bytes == 2 * SIZE
    assert len(other.stored) == 1  # once a round, not for each step


async def test_any_one_of_eight_nodes_may_be_lost_and_any_two_that_are_no_partners(
    tmp_path: Path,
) -> None:
    """Every set of one and two, with the same bytes (A9.1)."""
    count = 8
    of = cliques([ReplicaSlot(slot, f"rack-{slot // 2}") for slot in range(count)], 2, None, {})
    partner = {slot: Cliques(of).after(slot)[0] for slot in range(count)}
    nodes = [made(f"n{slot}", tmp_path / f"n{slot}") for slot in range(count)]
    async with running(nodes):
        for slot, node in enumerate(nodes):
            node.keep.begins(order(slot, peers=[nodes[partner[slot]].peer(partner[slot])]))
            node.save(slot, 10)
        for slot in range(count):
            await nodes[partner[slot]].has_held(slot, slot, 10)
        lost_sets = [(slot,) for slot in range(count)] + list(combinations(range(count), 2))
        for number, lost in enumerate(lost_sets):
            news = [made(f"new-{slot}", tmp_path / f"{number}-{slot}") for slot in lost]
            async with running(news):
                for slot, new in zip(lost, news, strict=True):
                    alive = [nodes[partner[slot]].peer(0)] if partner[slot] not in lost else []
                    new.keep.begins(order(slot, round=2, sources=alive))
                for slot, new in zip(lost, news, strict=True):
                    offer = await new.has_offer(2)
                    assert offer.complete == (partner[slot] not in lost), (lost, offer)
                    if offer.complete:
                        assert new.held(slot, slot) == {10: state_of(slot, 10)}
                    else:
                        assert offer.reason == "no node has a state of this slot in memory"
                        assert not new.held(slot, slot)


async def fetched(tmp_path: Path, source: Node) -> Node:
    """A node that takes slot 0 over, in round 2."""
    new = made("new", tmp_path / "new")
    async with running([source, new]):
        source.keep.begins(order(0))
        new.keep.begins(order(0, round=2, sources=[source.peer(1)]))
        await new.has_offer(2)
    return new


async def test_what_is_of_another_world_or_job_or_a_later_round_is_not_fetched(
    tmp_path: Path,
) -> None:
    """The older state of this world is fetched (A9.2)."""
    source = made("source", tmp_path / "source")
    source.save(0, 30, buffer="a", world=4)
    source.save(0, 20, buffer="b", round=3)
    source.save(0, 10, buffer="c")
    new = await fetched(tmp_path, source)
    assert new.held(0, 0) == {10: state_of(0, 10)}


async def test_a_state_that_is_not_what_its_hash_says_is_passed_over_for_an_older_one(
    tmp_path: Path,
) -> None:
    """One bit was flipped (A9.2)."""
    source = made("source", tmp_path / "source")
    torn = bytearray(state_of(0, 20))
    torn[SIZE // 2] ^= 1
    source.save(0, 20, buffer="a", octets=bytes(torn))
    source.save(0, 10, buffer="b")
    new = await fetched(tmp_path, source)
    assert new.held(0, 0) == {10: state_of(0, 10)}


async def test_a_torn_state_is_not_kept_and_said_once(tmp_path: Path) -> None:
    """The keeper refuses bytes that do not match their hash (A9.2)."""
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        one.save(0, 10, octets=state_of(0, 11))
        step, node, reason, cause = await until_async(
            lambda: one.failed[0], "it is reported", despite=IndexError
        )
        assert (step, node, cause) == (10, "other", "torn")
        assert "came with other bytes than its hash" in reason
        one.save(0, 20)
        assert await other.has_held(0, 0, 20) == state_of(0, 20)
    assert list(other.held(0, 0)) == [20]


async def test_more_than_the_quota_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """The keeper names what is needed and what is left (A9.6)."""
    small = replace(PATIENT, held_most_bytes=SIZE + SIZE // 2)
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other", small)
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        one.save(0, 10)
        await other.has_held(0, 0, 10)
        one.save(0, 20, buffer="b")
        _, _, reason, cause = await until_async(
            lambda: one.failed[0], "it is reported", despite=IndexError
        )
        assert cause == "quota"
        assert f"needs {SIZE} bytes more, and {SIZE // 2} may be taken" in reason
    assert list(other.held(0, 0)) == [10]
    files = [path for path in (other.folder / "held").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.name == "image") == SIZE


async def test_whoever_has_no_key_is_not_let_in(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        other.keep.begins(order(1))
        other.save(1, 10)
        one.keep.begins(order(1, round=2, sources=[other.peer(1)], key="another"))
        offer = await one.has_offer(2)
    assert not offer.complete
    assert "it has closed the connection" in offer.reason
    assert not one.held(1, 1)


async def test_a_round_that_is_over_is_not_listened_to(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        other.keep.begins(order(1, round=2))
        one.keep.begins(order(0, round=1, peers=[other.peer(1)]))
        one.save(0, 10)
        call = Call(other.peer(1), one.standing)
        with pytest.raises(ReplicaError, match="round 1 is over, the job is at round 2"):
            await asyncio.to_thread(put, call, one, 10)
        one.keep.begins(order(0, round=2, peers=[other.peer(1)]))
        assert await other.has_held(0, 0, 10) == state_of(0, 10)
    assert not one.failed


def put(call: Call, node: Node, step: int) -> None:
    """As the node itself does, without waiting for its turn."""
    (image,) = OwnImages(node.folder, JOB).of(0)
    with call:
        call.put(image.copy(0, 1), memoryview(state_of(0, step)))


async def test_dead_and_silent_keepers_hold_up_nobody_and_who_comes_back_is_served(
    tmp_path: Path,
) -> None:
    """The third keeper has the state meanwhile (A9.5)."""
    one = made("one", tmp_path / "one", replace(PATIENT, silent_s=1.0))
    good, late = (made(name, tmp_path / name) for name in ("good", "late"))
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, closing(socket.socket()) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens yet
        late.port = own.getsockname()[1]
        deaf = Peer(node="deaf", slot=3, address="127.0.0.1", port=silent.getsockname()[1])
        async with running([one, good]):
            good.keep.begins(order(1))
            one.keep.begins(order(0, peers=[late.peer(2), deaf, good.peer(1)]))
            one.save(0, 10)
            assert await good.has_held(0, 0, 10) == state_of(0, 10)
            said = await until_async(
                lambda: {node: cause for _, node, _, cause in one.failed if node != "good"},
                "both are reported",
                holds=lambda said: len(said) == 2,
            )
            assert said == {"late": "unreachable", "deaf": "slow"}
            async with running([late]):  # both may be bound to it, as one does not listen
                late.keep.begins(order(2))
                assert await late.has_held(0, 0, 10) == state_of(0, 10)


async def test_a_copy_goes_where_it_is_ordered_to(tmp_path: Path) -> None:
    names = ("owner", "holder", "third")
    owner, holder, third = (made(name, tmp_path / name) for name in names)
    async with running([owner, holder, third]):
        owner.keep.begins(order(0, peers=[holder.peer(1)]))
        holder.keep.begins(order(1))
        third.keep.begins(order(2))
        owner.save(0, 10)
        await holder.has_held(0, 0, 10)
        about: dict[str, Any] = {"id": "1" * 32, "job": JOB, "round": 1, "reason": ""}
        about |= {"owner_slot": 0, "step": 10}
        holder.keep.ask(CopyReplica(**about, to=third.peer(2)))
        assert await third.has_held(0, 0, 10) == state_of(0, 10)


async def test_an_image_that_is_released_is_restored_and_fetched_again(tmp_path: Path) -> None:
    owner, new = made("owner", tmp_path / "owner"), made("new", tmp_path / "new")
    async with running([owner, new]):
        owner.keep.begins(order(0))
        identity = owner.save(0, 10).identity
        owner.save(0, 20, buffer="b")
        place = owner.folder / "own" / "rank-0" / "a"
        mark_image(place, identity, CheckpointMark(reason="nan", failed_at=11))
        about: dict[str, Any] = {"id": "1" * 32, "job": JOB, "round": 1, "reason": "", "by": "ann"}
        owner.keep.ask(ReleaseImages(**about, step=20))
        release = ReleaseImages(**about, step=10)
        owner.keep.ask(release)
        await until_async(lambda: owner.released, "it is released")
        assert owner.released == [(release, "memory", place)]
        assert sorted(path.name for path in place.iterdir()) == ["image", "index.json"]

        new.keep.distrust(20)
        new.keep.begins(order(0, round=2, sources=[owner.peer(0)]))
        await new.has_offer(2)
        assert list(new.held(0, 0)) == [10]
        new.keep.ask(ReleaseImages(**about, step=20))
        new.keep.begins(order(0, round=3, sources=[owner.peer(0)]))
        await new.has_offer(3)
        assert sorted(new.held(0, 0)) == [10, 20]
        assert new.released == []


async def test_what_was_fetched_goes_when_every_rank_has_a_newer_state_of_its_own(
    tmp_path: Path,
) -> None:
    source, new = made("source", tmp_path / "source"), made("new", tmp_path / "new")
    async with running([source, new]):
        source.keep.begins(order(0))
        source.save(0, 10)
        new.keep.begins(order(0, round=2, sources=[source.peer(0)]))
        await new.has_offer(2)
        assert list(new.held(0, 0)) == [10]
        new.save(0, 20, round=2)
        await until_async(lambda: not new.held(0, 0), "it is dropped")


async def test_what_the_ranks_of_an_earlier_slot_have_left_goes_with_the_next_state(
    tmp_path: Path,
) -> None:
    node = made("node", tmp_path)
    async with running([node]):
        node.save(5, 10)
        node.keep.begins(order(0, round=2))
        await node.has_offer(2)
        assert (tmp_path / "own" / "rank-5").exists()  # others may still fetch it
        node.save(0, 20, round=2)
        await until_async(lambda: not (tmp_path / "own" / "rank-5").exists(), "it is removed")
    assert (tmp_path / "own" / "rank-0").exists()


async def test_an_agent_that_comes_back_finds_what_the_dead_one_has_held(tmp_path: Path) -> None:
    one, other = made("one", tmp_path / "one"), made("other", tmp_path / "other")
    async with running([one, other]):
        one.keep.begins(order(0, peers=[other.peer(1)]))
        other.keep.begins(order(1))
        one.save(0, 10)
        await other.has_held(0, 0, 10)
    torn = other.folder / "held" / "slot-0" / "rank-0" / "incoming"
    torn.mkdir()
    again = await asyncio.to_thread(made, "again", tmp_path / "other")
    new = made("new", tmp_path / "new")
    assert not torn.exists()
    async with running([again, new]):
        again.keep.begins(order(1, round=2))
        new.keep.begins(order(0, round=2, sources=[again.peer(1)]))
        assert (await new.has_offer(2)).complete
    assert new.held(0, 0) == {10: state_of(0, 10)}


async def test_all_ranks_of_a_slot_have_the_same_step_or_none(tmp_path: Path) -> None:
    """One rank lacks the newest step, so all take the older one (A9.2)."""
    source, new = made("source", tmp_path / "source"), made("new", tmp_path / "new")
    source.save(0, 10, buffer="a")
    source.save(0, 20, buffer="b")
    source.save(1, 10)
    async with running([source, new]):
        source.keep.begins(order(0, slots=4, ranks=2))
        new.keep.begins(order(0, slots=4, ranks=2, round=2, sources=[source.peer(0)]))
        offer = await new.has_offer(2)
    assert offer.complete
    assert {rank: list(new.held(0, rank)) for rank in (0, 1)} == {0: [10], 1: [10]}


async def saved_in_parts(owner: Node, holders: Sequence[Node], needed: int) -> list[Peer]:
    """Each holder has its part of what the owner has saved."""
    for slot, holder in enumerate(holders, 1):
        holder.keep.begins(order(slot))
    peers = [holder.peer(slot) for slot, holder in enumerate(holders, 1)]
    owner.keep.begins(order(0, peers=peers, parts_needed=needed))
    owner.save(0, 10)
    for holder in holders:
        await until_async(partial(getattr, holder, "stored"), f"{holder.name} has its part")
    return peers


async def test_with_parts_any_as_many_as_are_needed_give_the_state_back(tmp_path: Path) -> None:
    needed, holders = 2, [made(f"h{number}", tmp_path / f"h{number}") for number in range(3)]
    owner = made("owner", tmp_path / "owner")
    async with running([owner, *holders]):
        peers = await saved_in_parts(owner, holders, needed)
        coded = owner.folder / "coded"
        await until_async(lambda: not any(coded.iterdir()), "nobody sends a part any more")
        for alive in combinations(peers, needed):
            new = made("new", tmp_path / "-".join(peer.node for peer in alive))
            async with running([new]):
                new.keep.begins(order(0, round=2, sources=alive, parts_needed=needed))
                assert (await new.has_offer(2)).complete
            assert new.held(0, 0) == {10: state_of(0, 10)}
        new = made("new", tmp_path / "too-few")
        async with running([new]):
            new.keep.begins(order(0, round=2, sources=peers[:1], parts_needed=needed))
            assert not (await new.has_offer(2)).complete


@pytest.mark.parametrize("is_in_parts", [False, True])
async def test_who_breaks_off_and_has_what_nobody_else_has_is_asked_again_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_parts: bool
) -> None:
    monkeypatch.setattr(protocol, "_PIECE", 4096)
    most, real = 10 * 4096, ReplicaServer._give
    offsets: list[int] = []

    def give(server: ReplicaServer, link: ReplicaLink, asked: GetCopy) -> None:
        send, is_first = link.send, not offsets
        offsets.append(asked.offset)

        def break_off(octets: memoryview | bytes) -> None:
            send(octets[:most])
            if len(octets) > most:
                raise EOFError

        if is_first:
            monkeypatch.setattr(link, "send", break_off)
        real(server, link, asked)

    monkeypatch.setattr(ReplicaServer, "_give", give)
    holders = [made(f"h{number}", tmp_path / f"h{number}") for number in range(3)]
    owner, new = made("owner", tmp_path / "owner"), made("new", tmp_path / "new")
    async with running([owner, new, *holders]):
        if is_in_parts:
            sources = (await saved_in_parts(owner, holders, 2))[:2]
        else:
            owner.keep.begins(order(0))
            owner.save(0, 10)
            sources = [owner.peer(0)]
        new.keep.begins(order(0, round=2, sources=sources, parts_needed=1 + is_in_parts))
        assert (await new.has_offer(2)).complete
    assert new.held(0, 0) == {10: state_of(0, 10)}
    assert sorted(offsets) == [*[0] * len(sources), most]


async def test_parts_are_fetched_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, get, meeting = 2, Call.get, threading.Barrier(2)

    def get_together(call: Call, incoming: Incoming) -> None:
        meeting.wait(20)
        get(call, incoming)

    holders = [made(f"h{number}", tmp_path / f"h{number}") for number in range(3)]
    owner, new = made("owner", tmp_path / "owner"), made("new", tmp_path / "new")
    async with running([owner, new, *holders]):
        peers = await saved_in_parts(owner, holders, needed)
        monkeypatch.setattr(Call, "get", get_together)
        new.keep.begins(order(0, round=2, sources=peers, parts_needed=needed))
        assert (await new.has_offer(2)).complete
    assert new.held(0, 0) == {10: state_of(0, 10)}


async def test_ranks_fetch_from_different_nodes_where_several_have_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, asked = Call.get, {}

    def get_and_tell(call: Call, incoming: Incoming) -> None:
        asked[incoming.copy.rank] = call._to.node
        get(call, incoming)

    monkeypatch.setattr(Call, "get", get_and_tell)
    sources = [made(f"s{number}", tmp_path / f"s{number}") for number in range(2)]
    new = made("new", tmp_path / "new")
    async with running([*sources, new]):
        for source in sources:
            source.keep.begins(order(0, slots=4, ranks=2))
            for rank in (0, 1):
                source.save(rank, 10)
        peers = [source.peer(0) for source in sources]
        new.keep.begins(order(0, slots=4, ranks=2, round=2, sources=peers))
        assert (await new.has_offer(2)).complete
    assert asked == {0: "s0", 1: "s1"}
