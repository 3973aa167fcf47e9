"""Saves of two ranks whose writers are killed at counted points, and what is there after each.

`killing.py FOLDER each` kills at every operation that could be durable or not, of either writer;
`killing.py FOLDER N SEED` at N random ones of both. Says as JSON how many saves were killed, how
many became visible, and what was wrong after any of them.
"""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from xxhash import xxh3_128_hexdigest

from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity, ImageIndex, decode, step_name
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.storage.shelf import shelved, verify
from trainer_sdk.checkpoint.writer.dying import KILL_AT, arm
from trainer_sdk.checkpoint.writer.orders import Done, FromWriter, Kept, WriteState
from trainer_sdk.checkpoint.writer.serving import Service

RANKS = (0, 1)
FILE_BYTES = 64 << 10
SPARED = 1_000_000
Word = Literal["kept", "done", "failed"]


@dataclass
class Job:
    """Two ranks, and what is known of their checkpoints."""

    folder: Path
    round: int = 0
    committed: int = 0
    """The newest step that rank 0's writer has called visible."""
    kept: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RANKS, 0))
    """The newest step that each writer has called whole in memory."""
    wrong: list[str] = field(default_factory=list)

    def save(self, points: dict[int, int]) -> bool:
        """Save the next step in a round of its own; whether nobody was killed."""
        self.round += 1
        step = self.round
        writers = {}
        for rank in RANKS:
            reading, writing = os.pipe()
            writer = os.fork()
            if not writer:
                _write(self.folder, step, rank, points[rank], writing)
            os.close(writing)
            writers[writer] = rank, reading
        self._wait(set(writers))
        spared = True
        for rank, reading in writers.values():
            with open(reading) as heard:
                for word in heard.read().split():
                    self._hear(word, rank, step)
                    spared = spared and word != "failed"
        return spared and self.committed == step and set(self.kept.values()) == {step}

    def look(self, what: str) -> None:
        """Whatever can be seen is whole, and nothing that was there before is lost."""
        storage = storage_for(str(self.folder / "root"))
        steps = []
        for one in shelved(storage):
            verdict = verify(storage, one)
            if verdict.is_good:
                steps.append(one.step)
            else:
                self.wrong.append(f"{what}: step {one.step} can be seen: {verdict.flaw}")
        if max(steps, default=0) < self.committed:
            self.wrong.append(f"{what}: step {self.committed} was visible, and {steps} are")
        for old in sorted(steps)[:-2]:  # what there is would take ever longer to read
            shutil.rmtree(self.folder / "root" / step_name(old))
        for rank in RANKS:
            images = [_step_of(one) for one in _buffers(self.folder, rank)]
            if max(images) < self.kept[rank]:
                self.wrong.append(f"{what}: rank {rank} had {self.kept[rank]}, and has {images}")

    def _hear(self, word: str, rank: int, step: int) -> None:
        if word == "kept":
            self.kept[rank] = step
        elif word == "done" and not rank:
            self.committed = step

    def _wait(self, writers: set[int]) -> None:
        """The first that is killed ends the round: then all are."""
        while writers:
            writer, status = os.wait()
            writers.discard(writer)
            if os.WIFSIGNALED(status):
                for other in writers:
                    os.kill(other, signal.SIGKILL)


def _write(folder: Path, step: int, rank: int, point: int, telling: int) -> NoReturn:
    """Be a rank that fills its buffer, and then its writer."""
    buffers = _buffers(folder, rank)
    buffer = min(buffers, key=_step_of)
    (buffer / INDEX).unlink(missing_ok=True)
    octets = bytearray(random.Random(f"{step}/{rank}").randbytes(2 * FILE_BYTES))
    octets[-2:] = b"[]"
    with (buffer / IMAGE).open("wb") as image:
        image.write(octets)
    order = WriteState(
        save=1,
        image=str(buffer / IMAGE),
        folder=str(buffer),
        identity=Identity(job="killing", round=step, step=step, world_size=2, layout="l"),
        rank=rank,
        file_bytes=FILE_BYTES,
        image_bytes=FILE_BYTES + 4096,
        metadata=(FILE_BYTES + 4096, 100),
        entries=(2 * FILE_BYTES - 2, 2),
        root=str(folder / "root"),
        saving=saving_name(step, step, "mark", 1),
        shard=f"__{rank}_0.distcp",
        keep=True,
        within_s=40.0,
    )

    def tell(line: FromWriter) -> None:
        word = {Kept: "kept", Done: "done"}.get(type(line), "")
        if word:
            said.write(f"{word} ".encode())

    with open(telling, "wb", buffering=0) as said:
        arm({KILL_AT: str(point)})
        Service(tell).work(order)
    os._exit(0)


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
    return index.identity.step


def every(job: Job) -> Iterator[tuple[bool, dict[int, int]]]:
    """One writer is killed at each of its operations in turn, until it has no more."""
    for victim in RANKS:
        point, is_over = 0, False
        while not is_over:
            point += 1
            points = dict.fromkeys(RANKS, SPARED) | {victim: point}
            is_over = job.save(points)
            yield not is_over, points


def at_random(job: Job, count: int, seed: int) -> Iterator[tuple[bool, dict[int, int]]]:
    """Both writers are killed somewhere, so often."""
    chance = random.Random(seed)
    killed = 0
    while killed < count:
        points = {rank: chance.randint(1, 60) for rank in RANKS}
        was_killed = not job.save(points)
        killed += was_killed
        yield was_killed, points


def main() -> None:
    folder = Path(sys.argv[1])
    job, killed, saved = Job(folder), 0, 0
    how = every(job) if sys.argv[2] == "each" else at_random(job, *map(int, sys.argv[2:4]))
    for was_killed, points in how:
        killed += was_killed
        saved += not was_killed
        job.look(f"killed at {points}")
    job.save(dict.fromkeys(RANKS, SPARED))
    job.look("at the end")
    hidden = (one for one in folder.rglob(".*") if one.name != ".metadata")
    left = sorted(
        str(one.relative_to(folder)) for one in hidden if one.is_file() or any(one.iterdir())
    )
    print(json.dumps({"killed": killed, "saved": saved, "wrong": job.wrong, "left": left}))


if __name__ == "__main__":
    main()
