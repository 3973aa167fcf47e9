"""The way back of a training one of whose nodes was replaced: what it waits for in `restore()`.

    python -m benchmarks.replaced
    python -m benchmarks.replaced --mib 1024 --building 0 --start cold

Two nodes with one rank each and a spare, on this machine. Each rank keeps a state in memory, its
agent sends it to the other node, and the second node is killed with all that it has started; its
memory is gone. The spare's agent fetches the state while its rank is being started, and the rank
writes down how long `restore()` took, and what it gave. It is called when the training has a
process group and its state, and has been built for some seconds: model, data and what wraps them.

In turns with the rounds as many bytes over a socket on loopback, into memory that was used before
and into a new file in memory, and a copy of them. Exit code 1 if the training waits for more than
1.3 times the socket.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.replacing.cases import Outcome, Saving, play
from benchmarks.replicas import raw_sender, timed
from benchmarks.restarts.options import workplace
from benchmarks.rig import HEAD, row

MOST = 1.3
MEMORY = "/dev/shm"
TIMES = 3
STATES = 8
"""The most that are in the memory of all nodes and their ranks together."""
SOCKET = "raw socket, to memory used again"
NEW = "raw socket, to a new file in memory"
COPY = "copy, to memory used again"


def main() -> int:
    asked = _asked()
    outcomes: list[Outcome] = []
    training = Saving(mib=asked.mib, building_s=asked.building)
    raw: dict[str, list[float]] = {SOCKET: [], NEW: [], COPY: []}
    with workplace() as folder:
        for turn in range(asked.rounds):
            with in_memory() as place:
                touch(place, STATES * asked.mib)
                outcomes.append(play(folder / str(turn), place, asked.start, training))
            with in_memory() as place:
                for name, took_ms in limits(place, asked.mib).items():
                    raw[name] += took_ms
    print(f"{asked.mib} MiB on each rank, {asked.start}, {asked.building:g} s to build; ms")
    return _show(outcomes, raw)


def _asked() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mib", type=int, default=512, help="of state on each rank (512)")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--building", type=float, default=2.0, metavar="S", help="seconds (2)")
    made.add_argument("--start", choices=("warm", "cold"), default="warm", help="of ranks (warm)")
    return made.parse_args()


@contextmanager
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="everstep-replaced-") as folder:
        yield Path(folder)


def touch(folder: Path, mib: int) -> None:
    """Touch this much memory: a virtual machine gets memory for the first time far more slowly."""
    octets = os.urandom(1 << 20)
    with (folder / "touched").open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(octets)
    (folder / "touched").unlink()


def limits(folder: Path, mib: int) -> dict[str, list[float]]:
    """Milliseconds, in turns; the first time of each meets memory that nobody has touched."""
    image = folder / "image"
    image.write_bytes(os.urandom(1 << 20) * mib)
    source, target = memoryview(image.read_bytes()), memoryview(bytearray(mib << 20))

    def copy() -> None:
        target[:] = source

    with raw_sender(image) as send, raw_sender(image, to=str(folder)) as send_to_new:
        ways = {SOCKET: send, NEW: send_to_new, COPY: copy}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(1 + TIMES):
            for name, way in ways.items():
                seconds = timed(way)
                if turn:
                    took[name].append(1000 * seconds)
    return took


def _show(outcomes: Sequence[Outcome], raw: Mapping[str, Sequence[float]]) -> int:
    peer = [one.peer_ms for one in outcomes]
    own = [one.own_ms for one in outcomes]
    rows: dict[str, Sequence[float]] = {
        "restore(), from a peer": peer,
        "restore(), own memory": own,
        "fetched by the agent": [one.fetch_ms for one in outcomes],
        "  so long before restore() was called": [one.ahead_ms for one in outcomes],
        "from the kill to the next step": [one.back_ms for one in outcomes],
        **raw,
    }
    print(HEAD)
    for name, values in rows.items():
        print(row(name, values))
    link, new, copy = (statistics.median(raw[name]) for name in (SOCKET, NEW, COPY))
    waited = statistics.median(peer)
    print(f"from a peer: {waited / link:.2f} x the raw socket, {waited / new:.2f} x to a new file")
    print(f"own memory: {statistics.median(own) / copy:.2f} x the copy")
    return int(waited > MOST * link)


if __name__ == "__main__":
    sys.exit(main())
