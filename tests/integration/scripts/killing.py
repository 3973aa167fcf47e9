"""Saves of two ranks whose writers are killed at counted points, and what is there after each.

`killing.py FOLDER each [URL]` kills at every operation that could be durable or not, of either
writer, while its state comes piece by piece: for good, for another writer to go on, where the state
is given up, and where it comes in waves. `killing.py FOLDER N SEED [URL]` kills at N random ones of
both. They save below FOLDER, or into the object store. Says as JSON in how many saves one was
killed, and in how many when it had written some of a state that was still being copied, how many
came to their end, what was wrong after any of them, and what the dead have left.
"""

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from tests.checkpoint_helpers.killed_writer import (
    BUFFER_BYTES,
    FILE_BYTES,
    GOES_ON,
    IMAGE_BYTES,
    Killed,
    Way,
    shard_name,
    state,
)
from tests.checkpoint_helpers.killing_server import unfinished
from tests.checkpoint_helpers.small_pieces import write_small_pieces
from tests.scripted import apart
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, MANIFEST, ImageIndex, decode, step_name
from trainer_sdk.checkpoint.storage import Storage, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import (
    OWNER,
    StoredCheckpoint,
    stored_checkpoints,
    verify,
)
from trainer_sdk.checkpoint.storage.leftovers import leftovers, sweep
from trainer_sdk.checkpoint.writer.files import part_name

RANKS = (0, 1)
SPARED = 1_000_000

Points = dict[int, list[int]]
"""Where the writers of each rank are killed: the first, and those that go on after it."""


@dataclass
class Round:
    """One save of both ranks."""

    root: str
    step: int
    way: Way
    points: Points
    buffers: dict[int, Path]
    busy: int = 0
    keeping: set[int] = field(default_factory=set)
    """Ranks whose last writer keeps an image."""
    said: dict[int, list[int]] = field(default_factory=lambda: {rank: [] for rank in RANKS})
    """Where each rank's writers can be heard."""

    def start(self, rank: int) -> int:
        """A writer; one that goes on after another finds all of the state."""
        number = len(self.said[rank])
        way = "at once" if number else self.way
        point, buffer = self.points[rank][number], self.buffers[rank]
        killed = Killed(self.root, buffer, self.step, rank, way, point, self.busy)
        (self.keeping.add if killed.keeps else self.keeping.discard)(rank)
        reading, writing = os.pipe()
        writer = os.fork()
        if not writer:
            killed.write(writing)
            os._exit(0)
        os.close(writing)
        self.said[rank].append(reading)
        return writer

    def may_go_on(self, rank: int) -> bool:
        return len(self.said[rank]) < len(self.points[rank])


@dataclass
class Job:
    """Two ranks, and what is known of their checkpoints."""

    folder: Path
    root: str
    round: int = 0
    committed: int = 0
    """The newest step that rank 0's writer has called visible."""
    kept: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RANKS, 0))
    """The newest step that each writer has called whole in memory."""
    amid: int = 0
    """Saves with a writer that was killed when it had written some of what was being copied."""
    wrong: list[str] = field(default_factory=list)

    def save(self, points: Points, way: Way, busy: int = 0) -> bool:
        """Save the next step in a round of its own; whether a writer was killed."""
        self.round += 1
        buffers = {rank: min(_buffers(self.folder, rank), key=_step_of) for rank in RANKS}
        for buffer in buffers.values():
            (buffer / INDEX).unlink(missing_ok=True)
            with (buffer / IMAGE).open("ab") as image:
                image.truncate(BUFFER_BYTES)
        this = Round(self.root, self.round, way, points, buffers, busy)
        was_killed, is_over = self._wait(this)
        told = [self._hear(rank, one) for rank in RANKS for one in this.said[rank]]
        self.amid += any("copies" in words and "copied" not in words for words in told)
        is_kept = all(self.kept[rank] == self.round for rank in this.keeping)
        is_whole = self.committed == self.round and is_kept
        if not (is_whole or is_over or way == "given up"):
            self.wrong.append(f"step {self.round} failed: {told}")
        return was_killed

    def look(self, what: str) -> None:
        """Whatever can be seen is whole, and nothing that was there before is lost."""
        wrong, steps = apart(self._visible)
        self.wrong += [f"{what}: {one}" for one in wrong]
        if max(steps, default=0) < self.committed:
            self.wrong.append(f"{what}: step {self.committed} was visible, and {steps} are")
        for rank in RANKS:
            images = [_step_of(one) for one in _buffers(self.folder, rank)]
            if max(images) < self.kept[rank]:
                self.wrong.append(f"{what}: rank {rank} had {self.kept[rank]}, and has {images}")

    def left(self) -> list[str]:
        """All other files than checkpoints, once failed saves are swept away."""
        storage = storage_for(self.root)
        if "://" not in self.root:
            hidden = (one for one in self.folder.rglob(".*") if one.name != ".metadata")
            return sorted(
                str(one.relative_to(self.folder))
                for one in hidden
                if one.is_file() or any(one.iterdir())
            )
        for one in leftovers(storage, after_s=-60):  # the store's clock counts seconds
            sweep(storage, one)
        known = {OWNER}
        for there in stored_checkpoints(storage):
            assert there.manifest is not None
            inside = there.manifest.files[0].name.partition("/")[0]
            names = [one.name for one in there.manifest.files]
            names += [MANIFEST, *(f"{inside}/{part_name(rank)}" for rank in RANKS)]
            known |= {f"{step_name(there.step)}/{name}" for name in names}
        found = {one.name for folder in storage.folders() for one in storage.files(folder)}
        return sorted(found - known)

    def _visible(self) -> tuple[list[str], list[int]]:
        """What is wrong with what can be seen, and the good steps; two of them stay."""
        storage = storage_for(self.root)
        wrong, steps = [], []
        for one in stored_checkpoints(storage):
            verdict = verify(storage, one)
            if not verdict.is_good:
                wrong.append(f"step {one.step} can be seen: {verdict.flaw}")
            elif any(_shard(storage, one, rank) != _file(one.step, rank) for rank in RANKS):
                wrong.append(f"step {one.step} can be seen, and is another state")
            else:
                steps.append(one.step)
        for old in sorted(steps)[:-2]:  # what there is would take ever longer to read
            storage.remove(step_name(old))
        return wrong, steps

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


def _shard(storage: Storage, one: StoredCheckpoint, rank: int) -> bytes:
    assert one.manifest is not None
    (name,) = [file.name for file in one.manifest.files if file.name.endswith(shard_name(rank))]
    return storage.read(f"{step_name(one.step)}/{name}")


def _file(step: int, rank: int) -> bytes:
    return state(step, rank)[:FILE_BYTES]


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
    assert octets == state(step, rank)[:IMAGE_BYTES], f"{buffer} is not step {step}"
    return step


def every(job: Job) -> Iterator[tuple[bool, Points]]:
    """One writer is killed at each of its operations in turn, until it has no more."""
    ways: list[tuple[Way, list[int]]] = [("in pieces", []), ("in pieces", [SPARED])]
    for way, after in (*ways, ("given up", []), ("in waves", [])):
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
    ways: list[Way] = ["at once", "in pieces", "in pieces", "given up", "in waves"]
    most = 40 if "://" in job.root else 60
    killed = 0
    while killed < count:
        way = chance.choice(ways)
        attempts = chance.randint(1, 3) if way in GOES_ON else 1
        points = {rank: [chance.randint(1, most) for _ in range(attempts)] for rank in RANKS}
        was_killed = job.save(points, way, chance.choice((0, 0, 5)))
        killed += was_killed
        yield was_killed, points


def main(folder: Path, *words: str) -> None:
    write_small_pieces()
    *numbers, root = words if "://" in words[-1] else (*words, str(folder / "root"))
    job, killed, ended = Job(folder, root), 0, 0
    how = every(job) if numbers == ["each"] else at_random(job, *map(int, numbers))
    for was_killed, points in how:
        killed += was_killed
        ended += not was_killed
        job.look(f"killed at {points}")
    spared: list[Way] = ["in pieces", "in waves", "at once"]
    for one in spared:
        job.save({rank: [SPARED] for rank in RANKS}, one)
        job.look("at the end")
    found = {"killed": killed, "amid": job.amid, "ended": ended, "wrong": job.wrong}
    if "://" in root:
        found["unfinished"] = unfinished()
    print(json.dumps(found | {"left": apart(job.left)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
