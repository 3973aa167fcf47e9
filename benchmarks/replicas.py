"""States sent to another node and fetched from there, next to raw sockets that move the same bytes.

Two processes on loopback, 256 MiB in files in `/dev/shm`, or in EVERSTEP_BENCH_DIR; the raw
receiver fills a buffer that it has used before and checks nothing, ours writes to a file and
hashes. The same over TLS. Then states in parts: what coding costs a core, and what mirrors and
parts survive, with all combinations counted.
"""

import asyncio
import itertools
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import trustme
import xxhash
from msgspec import structs

from benchmarks.rig import HEAD, row
from everstep.clock import SystemClock
from everstep.messages import Peer, ReleaseImages, StartRanks
from everstep_services.agent.replicas import erasure_code
from everstep_services.agent.replicas.manager import ReplicaManager
from everstep_services.agent.replicas.memory_file import MappedFiles
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.store import HeldCopy, ReplicaStore
from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.protocol import Copy
from everstep_services.agent.replicas.transfer.server import opened_port
from everstep_services.agent.replicas.transfer.tls import opened_tls
from everstep_services.rendezvous.domain.replica_placement import Cliques, ReplicaSlot, cliques
from trainer_sdk.checkpoint.manifest import Identity, ImageIndex, encode

SIZE = int(os.environ.get("EVERSTEP_BENCH_MIB", "256")) << 20
MEMORY = os.environ.get("EVERSTEP_BENCH_DIR", "/dev/shm")
TIMES, WARM = 7, 2
SETTINGS = CheckpointSettings(room_least_bytes=0)
NODES = 16
PIECE = 512 << 10
FETCHED = "fetched"
Way = Callable[[], None]


def order(number: int) -> StartRanks:
    return StartRanks(
        id="0" * 32, job="bench", round=1, reason="", slot=number, slots=2, first_rank=number,
        ranks=1, world_size=2, master_address="127.0.0.1", master_port=1, replica_key="k" * 32,
    )  # fmt: skip


def copy_of(step: int, digest: str) -> Copy:
    identity = Identity(job="bench", round=1, step=step, world_size=2, layout="l")
    index = ImageIndex(identity=identity, rank=0, size_bytes=SIZE, hash=digest, entries=())
    return Copy(
        slot=0, rank=0, ranks=1, step=step, size_bytes=SIZE, hash=digest, index=encode(index)
    )


# -- the other process -----------------------------------------------------------------------------


def raw_receiver(ready: Connection, size: int, folder: str) -> None:
    """Receive this number of bytes again and again, and report when they came.

    Into a buffer that is used again, or, with a folder, into a new file in it.
    """
    with socket.create_server(("127.0.0.1", 0)) as door:
        ready.send(door.getsockname()[1])
        wire, _ = door.accept()
    buffer = memoryview(bytearray(size))
    with wire:
        while True:
            at, path = 0, Path(folder, "raw")
            with path.open("wb", buffering=0) if folder else nullcontext() as file:
                while at < size:
                    count = wire.recv_into(buffer[at : at + PIECE] if folder else buffer[at:])
                    if not count:
                        return
                    if file is not None:
                        file.write(buffer[at : at + count])
                    at += count
            wire.sendall(b"x")
            if folder:
                path.unlink()


class NoEvents:
    """Nobody records what happens to states."""

    def stored(self, held: HeldCopy, by: str, took_s: float) -> None: ...

    def failed(self, step: int, node: str, reason: str, cause: str) -> None: ...

    def released(self, order: ReleaseImages, tier: str, folder: Path) -> None: ...


def holder(ready: Connection, folder: str, settings: CheckpointSettings) -> None:
    """An agent's keeping of states, and nothing else of it."""

    async def run() -> None:
        base = Path(folder)
        standing = TransferContext("bench", "holder", settings, order(1), opened_tls(settings))
        store = ReplicaStore(base, "bench", settings)
        keep = ReplicaManager(standing, base, store, SystemClock(), NoEvents())
        with opened_port("127.0.0.1", 0) as door:
            ready.send(door.getsockname()[1])
            await keep.keep_for_ever(door)

    asyncio.run(run())


@contextmanager
def other(main: Callable[..., None], *arguments: object) -> Iterator[int]:
    """It runs in parallel with us; its port."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=main, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


# -- figures ---------------------------------------------------------------------------------------


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def raw_sender(image: Path, *, by_kernel: bool = False, to: str = "") -> Iterator[Way]:
    """Sends it, and returns when it has come."""
    size = image.stat().st_size
    with (
        other(raw_receiver, size, to) as port,
        image.open("rb") as file,
        socket.create_connection(("127.0.0.1", port)) as wire,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as octets,
    ):

        def send() -> None:
            if by_kernel:
                wire.sendfile(file, 0, size)
            else:
                wire.sendall(octets)
            wire.recv(1)

        yield send


def with_tls(folder: Path) -> CheckpointSettings:
    """Files as an operator would make them."""
    authority = trustme.CA()
    ours = authority.issue_cert("node.bench")
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    ours.private_key_and_cert_chain_pem.write_to_path(folder / "node.pem")
    node = folder / "node.pem"
    return structs.replace(SETTINGS, ca_file=folder / "ca.pem", cert_file=node, key_file=node)


@contextmanager
def our_sender(
    image: Path, folder: Path, settings: CheckpointSettings = SETTINGS
) -> Iterator[tuple[Way, Way]]:
    """Sends it, as the next step each time; fetches the newest to memory that is new."""
    (folder / "holder").mkdir(parents=True)
    steps, digest = itertools.count(), xxhash.xxh3_128_hexdigest(image.read_bytes())
    with other(holder, str(folder / "holder"), settings) as port:
        peer = Peer(node="holder", slot=1, address="127.0.0.1", port=port)
        standing = TransferContext("bench", "owner", settings, order(0), opened_tls(settings))
        newest, readings = [copy_of(0, digest)], MappedFiles()

        def put() -> None:
            newest[0] = copy_of(next(steps), digest)
            with Call(peer, standing) as call:
                call.put(newest[0], readings.of(image, SIZE))

        yield put, lambda: fetch(peer, standing, folder, newest[0])


def fetch(peer: Peer, standing: TransferContext, folder: Path, copy: Copy) -> None:
    """Everything but asking who has it; earlier states must be removed by then."""
    store = ReplicaStore(folder / FETCHED, "bench", SETTINGS)
    (folder / FETCHED).mkdir()
    incoming = store.begin(copy)
    assert incoming is not None
    with Call(peer, standing) as call:
        call.get(incoming)
    store.finish(incoming)


def coded_s(image: Path, folder: Path, needed: int, parts: int) -> tuple[list[float], list[float]]:
    """Made into parts, and given back without the first ones, by one core."""
    paths = tuple(str(folder / f"part-{number}") for number in range(parts))
    making = erasure_code.Encode(
        needed=needed, parts=parts, image=str(image), size_bytes=SIZE, paths=paths
    )
    back = folder / "back"
    back.touch()
    numbers = tuple(range(parts - needed, parts))
    reading = erasure_code.Decode(
        needed=needed, parts=parts, numbers=numbers, paths=paths[parts - needed :],
        image=str(back), size_bytes=SIZE,
    )  # fmt: skip
    made = [timed(partial(erasure_code.encode, making)) for _ in range(3)]
    read = [timed(partial(erasure_code.decode, reading)) for _ in range(3)]
    assert back.read_bytes() == image.read_bytes()
    return made, read


def survived(factor: int, parts_needed: int, lost: int) -> float:
    """The part of all ways to lose this number of nodes in which no state is lost."""
    of = Cliques(cliques([ReplicaSlot(slot) for slot in range(NODES)], factor, None, {}))
    keepers = {slot: of.after(slot)[: factor - 1] for slot in range(NODES)}

    def is_there(slot: int, gone: tuple[int, ...]) -> bool:
        return slot not in gone or len(set(keepers[slot]) - set(gone)) >= parts_needed

    ways = combinations(range(NODES), lost)
    return sum(all(is_there(slot, gone) for slot in gone) for gone in ways) / comb(NODES, lost)


def cpu_s() -> float:
    """What this process and its helpers have used."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children())]
    return float(sum(each.user + each.system for each in times))


def rates(took_s: list[float]) -> list[float]:
    return [SIZE / seconds / 2**20 for seconds in took_s]


def transfers(image: Path, folder: Path) -> None:
    """All in turns: whatever else the machine does meets them alike."""
    with (
        raw_sender(image) as plain,
        raw_sender(image, by_kernel=True) as kernel,
        raw_sender(image, to=str(folder)) as to_new,
        our_sender(image, folder / "plain") as (put, get),
        our_sender(image, folder / "secure", with_tls(folder / "tls")) as (put_tls, get_tls),
    ):
        ways = {
            "raw socket, send": plain,
            "raw socket, sendfile": kernel,
            "raw socket, to a new file in memory": to_new,
            "everstep, sent, verified and visible": put,
            "everstep, fetched to new memory": get,
            "everstep, sent over TLS": put_tls,
            "everstep, fetched over TLS": get_tls,
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(TIMES + WARM):
            for name, way in ways.items():
                before = cpu_s()
                seconds = timed(way)
                for left in folder.glob(f"*/{FETCHED}"):
                    shutil.rmtree(left)
                if turn >= WARM:
                    took[name].append(seconds)
                    spent[name].append((cpu_s() - before) * 2**30 / SIZE)
    print(f"{SIZE >> 20} MiB, loopback, two processes each, in turns; MiB/s")
    print(HEAD)
    for name, seconds_each in took.items():
        print(row(name, rates(seconds_each)))
    raw, _, new, sent, fetched, *_ = (statistics.median(each) for each in took.values())
    print(f"sent: {raw / sent:.2f} of the raw socket")
    print(f"fetched: {fetched / raw:.2f} x its time, {fetched / new:.2f} x that to a new file")
    print("\nprocessor time of both processes, whatever else the machine does; s a GiB")
    for name, seconds_each in spent.items():
        print(f"{name:44}{statistics.median(seconds_each):12.2f}")


def parts(image: Path, folder: Path) -> None:
    """What it takes to make them and to read them."""
    print("\nparts, one core, hashed and written; MiB/s of the state")
    print(HEAD)
    for name, needed, count in (("XOR 4+1", 4, 5), ("Reed-Solomon 4+2", 4, 6)):
        try:
            made, read = map(rates, coded_s(image, folder, needed, count))
        except SystemExit as error:
            print(f"{name}: {error}")
            continue
        print(row(f"{name}: made", made))
        print(row(f"{name}: given back without the first", read))


def losses() -> None:
    """All combinations of lost nodes, counted."""
    print(f"\n{NODES} nodes: memory besides the own state, and the part of all losses survived")
    print(f"{'':28}{'memory':>8}{'any 1':>8}{'any 2':>8}{'any 3':>8}{'any 4':>8}")
    for name, factor, needed in (
        ("mirror 2", 2, 1),
        ("mirror 3", 3, 1),
        ("XOR 4+1", 6, 4),
        ("Reed-Solomon 4+2", 7, 4),
    ):
        shown = "".join(f"{survived(factor, needed, lost):8.1%}" for lost in (1, 2, 3, 4))
        print(f"{name:28}{(factor - 1) / needed:8.2f}{shown}")


def main() -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="everstep-bench-") as place:
        folder = Path(place)
        image = folder / "image"
        image.write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
        transfers(image, folder)
        parts(image, folder)
    losses()


if __name__ == "__main__":
    main()
