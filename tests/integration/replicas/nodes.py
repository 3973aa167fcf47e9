"""Nodes of one job, as far as they keep states for each other: real servers, on loopback."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import xxhash

from everstep.clock import SystemClock
from everstep.messages import Peer, ReleaseImages, StartRanks
from everstep_services.agent.replicas.manager import ReplicaManager
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.store import HeldCopy, ReplicaStore
from everstep_services.agent.replicas.transfer import client, server
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.fetcher import OFFER, Offer
from everstep_services.agent.replicas.transfer.server import opened_port
from everstep_services.agent.replicas.transfer.tls import opened_tls
from tests.waiting import until_async
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity, ImageEntry, ImageIndex, encode

JOB, KEY = "j", "the-key-of-one-job"
SIZE = 300_000
PATIENT = CheckpointSettings(room_least_bytes=0, silent_s=30.0, least_mib_s=0.01)
"""For tests in which nobody is silent: a node that stalls meanwhile is not given up."""


def state_of(rank: int, step: int, size: int = SIZE) -> bytes:
    return random.Random(rank * 100_003 + step).randbytes(size)


def save_image(
    folder: Path, rank: int, step: int, *, buffer: str = "a", round: int = 1, world: int = 8,
    size: int = SIZE, octets: bytes | None = None,
) -> ImageIndex:  # fmt: skip
    """As a rank's writer does; `octets` are other ones than the index says."""
    place = folder / "own" / f"rank-{rank}" / buffer
    place.mkdir(parents=True, exist_ok=True)
    (place / INDEX).unlink(missing_ok=True)
    data = state_of(rank, step, size)
    index = ImageIndex(
        identity=Identity(job=JOB, round=round, step=step, world_size=world, layout="l"),
        rank=rank,
        size_bytes=size,
        hash=xxhash.xxh3_128_hexdigest(data),
        entries=(ImageEntry(key="w", offset=0, length=size, dtype="torch.uint8", shape=(size,)),),
    )
    (place / IMAGE).write_bytes(data if octets is None else octets)
    (place / f".{INDEX}").write_bytes(encode(index))
    (place / f".{INDEX}").rename(place / INDEX)
    return index


@dataclass
class SeenEvents:
    """Remembers what happens to the states of a node."""

    of_stored: list[HeldCopy] = field(default_factory=list)
    of_failed: list[tuple[int, str, str, str]] = field(default_factory=list)
    of_released: list[tuple[ReleaseImages, str, Path]] = field(default_factory=list)

    def stored(self, held: HeldCopy, by: str, took_s: float) -> None:
        self.of_stored.append(held)

    def failed(self, step: int, node: str, reason: str, cause: str) -> None:
        self.of_failed.append((step, node, reason, cause))

    def released(self, order: ReleaseImages, tier: str, folder: Path) -> None:
        self.of_released.append((order, tier, folder))


@dataclass
class Node:
    """One of them; `keep` works only inside of `running`."""

    name: str
    folder: Path
    store: ReplicaStore
    keep: ReplicaManager
    standing: TransferContext
    seen: "SeenEvents"
    port: int = 0

    @property
    def stored(self) -> list[HeldCopy]:
        return self.seen.of_stored

    @property
    def failed(self) -> list[tuple[int, str, str, str]]:
        return self.seen.of_failed

    @property
    def released(self) -> list[tuple[ReleaseImages, str, Path]]:
        return self.seen.of_released

    def peer(self, slot: int) -> Peer:
        return Peer(node=self.name, slot=slot, address="127.0.0.1", port=self.port)

    def save(self, rank: int, step: int, **how: Any) -> ImageIndex:
        """One of its ranks does, and reports it."""
        index = save_image(self.folder, rank, step, **how)
        self.keep.look()
        return index

    def held(self, slot: int, rank: int) -> dict[int, bytes]:
        """The whole copies here, by step; what is being received has no step in its name."""
        found = {}
        for place in (self.folder / "held" / f"slot-{slot}" / f"rank-{rank}").glob("[0-9]*"):
            with suppress(FileNotFoundError):  # it is dropped meanwhile
                octets = (place / IMAGE).read_bytes()
                (place / INDEX).stat()
                found[int(place.name.partition("-")[0])] = octets
        return found

    def offer(self) -> Offer | None:
        """The report when fetching was over."""
        path = self.folder / OFFER
        return msgspec.json.decode(path.read_bytes(), type=Offer) if path.exists() else None

    async def has_held(self, slot: int, rank: int, step: int) -> bytes:
        found = await until_async(
            lambda: self.held(slot, rank),
            f"{self.name} holds step {step} of slot {slot}",
            holds=lambda held: step in held,
        )
        return found[step]

    async def has_offer(self, round: int) -> Offer:
        return await until_async(
            self.offer, f"an offer for round {round}", holds=lambda offer: offer.round == round
        )


def made(name: str, folder: Path, settings: CheckpointSettings | None = None) -> Node:
    """A node that does nothing yet."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = settings or PATIENT
    standing = TransferContext(JOB, name, settings, tls=opened_tls(settings))
    store = ReplicaStore(folder, JOB, settings)
    seen = SeenEvents()
    keep = ReplicaManager(standing, folder, store, SystemClock(), seen)
    return Node(name, folder, store, keep, standing, seen)


@contextmanager
def patient() -> Iterator[None]:
    """Agents that stall while they connect or give proof are not given up either."""
    with (
        patch.object(client, "_CONNECTS_WITHIN_S", PATIENT.silent_s),
        patch.object(client, "_ANSWERS_WITHIN_S", PATIENT.silent_s),
        patch.object(server, "_PROVES_WITHIN_S", PATIENT.silent_s),
    ):
        yield


@asynccontextmanager
async def running(nodes: Sequence[Node]) -> AsyncIterator[None]:
    """While they are up; each has a port then, and the same when it comes back."""
    doors = []
    try:
        with patient():
            async with asyncio.TaskGroup() as tasks:
                loops = []
                for node in nodes:
                    door = opened_port("127.0.0.1", node.port)
                    doors.append(door)
                    node.port = int(door.getsockname()[1])
                    loops.append(tasks.create_task(node.keep.keep_for_ever(door), name=node.name))
                yield
                for loop in loops:
                    loop.cancel()
        for node in nodes:
            node.store.close()
    finally:
        for door in doors:
            door.close()


def order(
    slot: int, *, slots: int = 8, ranks: int = 1, round: int = 1, peers: Sequence[Peer] = (),
    sources: Sequence[Peer] = (), key: str = KEY, parts_needed: int = 1,
) -> StartRanks:  # fmt: skip
    """What rendezvous tells the holder of a slot."""
    return StartRanks(
        id="0" * 32,
        job=JOB,
        round=round,
        reason="",
        slot=slot,
        slots=slots,
        first_rank=slot * ranks,
        ranks=ranks,
        world_size=slots * ranks,
        master_address="127.0.0.1",
        master_port=1,
        replica_peers=tuple(peers),
        replica_sources=tuple(sources),
        replica_key=key,
        replica_parts_needed=parts_needed,
    )
