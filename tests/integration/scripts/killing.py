"""Saves of two ranks whose writers are killed at counted points, and what is there after each.

`killing.py FOLDER each` kills at every operation that could be durable or not, of either writer,
while its state comes piece by piece: for good, for another writer to go on, and where the state is
given up. `killing.py FOLDER N SEED` kills at N random ones of both. Says as JSON in how many saves
one was killed, and in how many when it had written some of a state that was still being copied, how
many came to their end, and what was wrong after any of them.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

from msgspec.structs import replace
from xxhash import xxh3_128_hexdigest

from tests.small_pieces import PIECE_BYTES, write_small_pieces
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity, ImageIndex, decode, step_name
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.storage.shelf import shelved, verify
from trainer_sdk.checkpoint.writer.dying import KILL_AT, arm
from trainer_sdk.checkpoint.writer.orders import (
    Done,
    Failed,
    Filled,
    FromWriter,
    GiveUp,
    Kept,
    WriteState,
)
from trainer_sdk.checkpoint.writer.publishing import abandon
from trainer_sdk.checkpoint.writer.serving import Service

RANKS = (0, 1)
FILE_BYTES = 8 * PIECE_BYTES
IMAGE_BYTES = FILE_BYTES + 4096
BUFFER_BYTES = 2 * FILE_BYTES
SPARED = 1_000_000
WITHIN_S = 40.0

Points = dict[int, list[int]]
"""Where the writers of each rank are killed: the first, and those that go on after it."""
Way = Literal["at once", "in pieces", "given up"]
"""How a state comes to its writer."""
Say = Callable[[str], None]
"""Tells the job a word."""


@dataclass
class Round:
    """One save of both ranks."""

    folder: Path
    step: int
    way: Way
    points: Points
    buffers: dict[int, Path]
    said: dict[int, list[int]] = field(default_factory=lambda: {rank: [] for rank in RANKS})
    """Where each rank's writers can be heard."""

    def start(self, rank: int) -> int:
        """A writer; one that goes on after another finds all of the state."""
        number = len(self.said[rank])
        way = "at once" if number else self.way
        reading, writing = os.pipe()
        writer = os.fork()
        if not writer:
            _write(self, rank, way, self.points[rank][number], writing)
        os.close(writing)
        self.said[rank].append(reading)
        return writer

    def may_go_on(self, rank: int) -> bool:
        return len(self.said[rank]) < len(self.points[rank])


@dataclass
class Job:
    """Two ranks, and what is known of their checkpoints."""

    folder: Path
    round: int = 0
    committed: int = 0
    """The newest step that rank 0's writer has called visible."""
    kept: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RANKS, 0))
    """The newest step that each writer has called whole in memory."""
    amid: int = 0
    """Saves with a writer that was killed when it had written some of what was being copied."""
    wrong: list[str] = field(default_factory=list)

    def save(self, points: Points, way: Way) -> bool:
        """Save the next step in a round of its own; whether a writer was killed."""
        self.round += 1
        buffers = {rank: min(_buffers(self.folder, rank), key=_step_of) for rank in RANKS}
        for buffer in buffers.values():
            (buffer / INDEX).unlink(missing_ok=True)
            with (buffer / IMAGE).open("ab") as image:
                image.truncate(BUFFER_BYTES)
        this = Round(self.folder, self.round, way, points, buffers)
        was_killed, is_over = self._wait(this)
        told = [self._hear(rank, one) for rank in RANKS for one in this.said[rank]]
        self.amid += any("copies" in words and "copied" not in words for words in told)
        is_whole = self.committed == self.round and set(self.kept.values()) == {self.round}
        if not (is_whole or is_over or way == "given up"):
            self.wrong.append(f"step {self.round} came to nothing: {told}")
        return was_killed

    def look(self, what: str) -> None:
        """Whatever can be seen is whole, and nothing that was there before is lost."""
        storage = storage_for(str(self.folder / "root"))
        steps = []
        for one in shelved(storage):
            verdict = verify(storage, one)
            if not verdict.is_good:
                self.wrong.append(f"{what}: step {one.step} can be seen: {verdict.flaw}")
            elif any(self._shard(one.step, rank) != _file(one.step, rank) for rank in RANKS):
                self.wrong.append(f"{what}: step {one.step} can be seen, and is another state")
            else:
                steps.append(one.step)
        if max(steps, default=0) < self.committed:
            self.wrong.append(f"{what}: step {self.committed} was visible, and {steps} are")
        for old in sorted(steps)[:-2]:  # what there is would take ever longer to read
            shutil.rmtree(self.folder / "root" / step_name(old))
        for rank in RANKS:
            images = [_step_of(one) for one in _buffers(self.folder, rank)]
            if max(images) < self.kept[rank]:
                self.wrong.append(f"{what}: rank {rank} had {self.kept[rank]}, and has {images}")

    def _shard(self, step: int, rank: int) -> bytes:
        return (self.folder / "root" / step_name(step) / _shard_name(rank)).read_bytes()

    def _hear(self, rank: int, reading: int) -> list[str]:
        with open(reading) as heard:
            words = heard.read().split()
        if "kept" in words:
            self.kept[rank] = self.round
        if "done" in words and not rank:
            self.committed = self.round
        return words

    def _wait(self, this: Round) -> tuple[bool, bool]:
        """Whether one was killed, and whether nobody went on: that is the end of all."""
        writers = {this.start(rank): rank for rank in RANKS}
        was_killed = is_over = False
        while writers:
            writer, status = os.wait()
            rank = writers.pop(writer)
            if not os.WIFSIGNALED(status):
                assert not status, f"the writer of rank {rank} has failed"
                continue
            was_killed = True
            if is_over:
                continue
            if this.may_go_on(rank):
                writers[this.start(rank)] = rank
            else:
                is_over = True
                for other in writers:
                    os.kill(other, signal.SIGKILL)
        return was_killed, is_over


def _write(this: Round, rank: int, way: Way, point: int, telling: int) -> NoReturn:
    """Be a rank that fills its buffer, and its writer."""
    order = _order(this, rank)
    with open(telling, "wb", buffering=0) as said, open(order.image, "r+b", buffering=0) as image:

        def say(word: str) -> None:
            said.write(f"{word} ".encode())

        def tell(line: FromWriter) -> None:
            if isinstance(line, (Kept, Done, Failed)):
                say(type(line).__name__.lower())

        copy = _Copy(order, image, _state(this.step, rank), say)
        arm({KILL_AT: str(point)})
        service = Service(tell)
        if way == "at once":
            copy.give(service)
        else:
            copy.give_in_pieces(service, gives_up=way == "given up")
        for one in threading.enumerate():
            if one is not threading.current_thread():
                one.join(WITHIN_S)
        if way == "given up":
            abandon(order.root, order.saving, this.step, rank, "it was changed")
    os._exit(0)


class _Copy:
    """Of one state into its buffer; each piece waits for the writer to have written the last."""

    def __init__(self, order: WriteState, image: BinaryIO, octets: bytes, say: Say) -> None:
        self._order = order
        self._image = image
        self._octets = octets
        self._say = say
        self._written = threading.Semaphore(0)
        plain = os.pwrite

        def pwrite(*arguments: object) -> int:
            size = plain(*arguments)  # type: ignore[arg-type]
            self._written.release()
            return size

        os.pwrite = pwrite

    def give(self, service: Service) -> None:
        self._put(0, BUFFER_BYTES)
        service.take(self._order)

    def give_in_pieces(self, service: Service, *, gives_up: bool) -> None:
        self._put(IMAGE_BYTES, BUFFER_BYTES)
        service.take(replace(self._order, is_filling=True))
        for end in range(PIECE_BYTES, FILE_BYTES, PIECE_BYTES):
            self._put(end - PIECE_BYTES, end)
            service.take(Filled(save=self._order.save, end=end))
            assert self._written.acquire(timeout=WITHIN_S)
            self._say("copies")
        self._say("copied")
        if gives_up:
            service.take(GiveUp(save=self._order.save))
        else:
            self._put(FILE_BYTES - PIECE_BYTES, IMAGE_BYTES)
            service.take(Filled(save=self._order.save, end=IMAGE_BYTES))

    def _put(self, begin: int, end: int) -> None:
        self._image.seek(begin)
        self._image.write(self._octets[begin:end])


def _order(this: Round, rank: int) -> WriteState:
    step = this.step
    return WriteState(
        save=1,
        image=str(this.buffers[rank] / IMAGE),
        folder=str(this.buffers[rank]),
        identity=Identity(job="killing", round=step, step=step, world_size=2, layout="l"),
        rank=rank,
        file_bytes=FILE_BYTES,
        image_bytes=IMAGE_BYTES,
        metadata=(IMAGE_BYTES, 100),
        entries=(BUFFER_BYTES - 2, 2),
        root=str(this.folder / "root"),
        saving=saving_name(step, step, "mark", 1),
        shard=_shard_name(rank),
        keep=True,
        within_s=WITHIN_S,
    )


def _state(step: int, rank: int) -> bytes:
    """All that is in the buffer."""
    return random.Random(f"{step}/{rank}").randbytes(BUFFER_BYTES - 2) + b"[]"


def _file(step: int, rank: int) -> bytes:
    return _state(step, rank)[:FILE_BYTES]


def _shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _buffers(folder: Path, rank: int) -> list[Path]:
    found = [folder / "images" / "own" / f"rank-{rank}" / name for name in "ab"]
    for one in found:
        one.mkdir(parents=True, exist_ok=True)
    return found


def _step_of(buffer: Path) -> int:
    """Of the whole image in it; 0 if there is none."""
    try:
        index = decode((buffer / INDEX).read_bytes(), ImageIndex, str(buffer))
    except FileNotFoundError:
        return 0
    octets = (buffer / IMAGE).read_bytes()[: index.size_bytes]
    assert xxh3_128_hexdigest(octets) == index.hash, f"{buffer} is not what its index says"
    step, rank = index.identity.step, index.rank
    assert octets == _state(step, rank)[:IMAGE_BYTES], f"{buffer} is not step {step}"
    return step


def every(job: Job) -> Iterator[tuple[bool, Points]]:
    """One writer is killed at each of its operations in turn, until it has no more."""
    ways: list[tuple[Way, list[int]]] = [("in pieces", []), ("in pieces", [SPARED])]
    for way, after in (*ways, ("given up", [])):
        for victim in RANKS:
            point, was_killed = 0, True
            while was_killed:
                point += 1
                points = {rank: [SPARED] for rank in RANKS} | {victim: [point, *after]}
                was_killed = job.save(points, way)
                yield was_killed, points


def at_random(job: Job, count: int, seed: int) -> Iterator[tuple[bool, Points]]:
    """Both writers are killed somewhere, so often, and some of those that go on after them."""
    chance = random.Random(seed)
    ways: list[Way] = ["at once", "in pieces", "in pieces", "given up"]
    killed = 0
    while killed < count:
        way = chance.choice(ways)
        attempts = 1 if way == "given up" else chance.randint(1, 3)
        points = {rank: [chance.randint(1, 60) for _ in range(attempts)] for rank in RANKS}
        was_killed = job.save(points, way)
        killed += was_killed
        yield was_killed, points


def main() -> None:
    write_small_pieces()
    folder = Path(sys.argv[1])
    job, killed, ended = Job(folder), 0, 0
    how = every(job) if sys.argv[2] == "each" else at_random(job, *map(int, sys.argv[2:4]))
    for was_killed, points in how:
        killed += was_killed
        ended += not was_killed
        job.look(f"killed at {points}")
    job.save({rank: [SPARED] for rank in RANKS}, "at once")
    job.look("at the end")
    hidden = (one for one in folder.rglob(".*") if one.name != ".metadata")
    left = sorted(
        str(one.relative_to(folder)) for one in hidden if one.is_file() or any(one.iterdir())
    )
    found = {"killed": killed, "amid": job.amid, "ended": ended, "wrong": job.wrong, "left": left}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
