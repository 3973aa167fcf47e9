"""A rank that fills its buffer, and its writer, which is killed at a counted point of its work."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from msgspec.structs import replace

from tests.checkpoint_helpers.killing_server import be_killed_at, sent
from tests.checkpoint_helpers.small_pieces import PIECE_BYTES
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import IMAGE, Identity
from trainer_sdk.checkpoint.storage.names import saving_name
from trainer_sdk.checkpoint.writer.__main__ import KILL_AT, arm
from trainer_sdk.checkpoint.writer.protocol import (
    BufferFilled,
    FromWriter,
    GiveUpSave,
    ImageKept,
    NextWindow,
    SaveDone,
    SaveFailed,
    WriteState,
)
from trainer_sdk.checkpoint.writer.publication import abandon
from trainer_sdk.checkpoint.writer.service import WriterService

FILE_BYTES = 8 * PIECE_BYTES
IMAGE_BYTES = FILE_BYTES + 4096
BUFFER_BYTES = 2 * FILE_BYTES
WITHIN_S = 40.0
_WINDOW_BYTES = 2 * PIECE_BYTES
_METADATA_BYTES = 100

Way = Literal["at once", "in pieces", "given up", "in waves"]
"""How a state comes to its writer."""
GOES_ON: tuple[Way, ...] = ("at once", "in pieces")
"""Where another writer may go on after one."""
Say = Callable[[str], None]
"""Tells the job a word."""


@dataclass(frozen=True)
class Killed:
    """One rank's save, and the operation at which its writer is killed."""

    root: str
    buffer: Path
    step: int
    rank: int
    way: Way
    point: int
    busy: int = 0
    """So often an object store says that it is; 0: never."""

    @property
    def keeps(self) -> bool:
        """Its image; what is sent to an object store while it is copied has none yet."""
        return self.way != "in waves" and ("://" not in self.root or self.way == "at once")

    def write(self, telling: int) -> None:
        """Do all of it, and tell what came of it."""
        order = self._order()
        with open(telling, "wb", buffering=0) as said, open(order.image, "r+b", buffering=0) as at:

            def say(word: str) -> None:
                said.write(f"{word} ".encode())

            copy = _Copy(order, at, state(self.step, self.rank), say)

            def tell(line: FromWriter) -> None:
                if isinstance(line, (ImageKept, SaveDone, SaveFailed)):
                    say(str(line.__struct_config__.tag))
                elif isinstance(line, NextWindow):
                    copy.written.release()

            self._arm()
            copy.give(WriterService(tell), self.way)
            for one in threading.enumerate():
                if one is not threading.current_thread():
                    one.join(WITHIN_S)
            if self.way == "given up":
                abandon(order, "it was changed")

    def _arm(self) -> None:
        if "://" in self.root:
            be_killed_at(self.point, self.busy)
        else:
            arm({KILL_AT: str(self.point)})

    def _order(self) -> WriteState:
        in_waves = self.way == "in waves"
        parallel = _WINDOW_BYTES if in_waves else IMAGE_BYTES
        return WriteState(
            save=1,
            image=str(self.buffer / IMAGE),
            folder=str(self.buffer),
            identity=Identity(
                job="killing", round=self.step, step=self.step, world_size=2, layout="l"
            ),
            rank=self.rank,
            file_bytes=FILE_BYTES,
            image_bytes=IMAGE_BYTES,
            metadata=(parallel, _METADATA_BYTES),
            entries=(BUFFER_BYTES - 2, 2),
            root=self.root,
            saving=saving_name(self.step, self.step, "mark", 1),
            shard=shard_name(self.rank),
            keep=self.keeps,
            window_bytes=_WINDOW_BYTES if in_waves else 0,
            within_s=WITHIN_S,
        )


@dataclass
class _Copy:
    """Of one state into its buffer; each piece waits for the writer to have had the last."""

    order: WriteState
    image: BinaryIO
    octets: bytes
    say: Say
    written: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def give(self, service: WriterService, way: Way) -> None:
        match way:
            case "at once":
                self._put(0, BUFFER_BYTES)
                service.take(self.order)
            case "in waves":
                self._in_waves(service)
            case _:
                self._in_pieces(service, gives_up=way == "given up")

    def _in_pieces(self, service: WriterService, *, gives_up: bool) -> None:
        if "://" not in self.order.root:
            self._hear_of_pieces()
        self._put(IMAGE_BYTES, BUFFER_BYTES)
        service.take(replace(self.order, is_filling=True))
        for end in range(PIECE_BYTES, FILE_BYTES, PIECE_BYTES):
            self._put(end - PIECE_BYTES, end)
            service.take(BufferFilled(save=self.order.save, end=end))
            self._wait_for(end // PIECE_BYTES)
        self.say("copied")
        if gives_up:
            service.take(GiveUpSave(save=self.order.save))
        else:
            self._put(FILE_BYTES - PIECE_BYTES, IMAGE_BYTES)
            service.take(BufferFilled(save=self.order.save, end=IMAGE_BYTES))

    def _in_waves(self, service: WriterService) -> None:
        self._put(IMAGE_BYTES, IMAGE_BYTES + _METADATA_BYTES, _WINDOW_BYTES)
        self._put(0, _WINDOW_BYTES)
        service.take(self.order)
        for at in range(_WINDOW_BYTES, FILE_BYTES, _WINDOW_BYTES):
            self._wait()
            self._put(at, at + _WINDOW_BYTES, 0)
            service.take(BufferFilled(save=self.order.save, end=at + _WINDOW_BYTES))
        self.say("copied")

    def _wait_for(self, pieces: int) -> None:
        if "://" in self.order.root:
            until(lambda: sent(self.order), "it is sent", holds=lambda count: count >= pieces)
            self.say("copies")
        else:
            self._wait()

    def _wait(self) -> None:
        assert self.written.acquire(timeout=WITHIN_S)
        self.say("copies")

    def _put(self, begin: int, end: int, to: int | None = None) -> None:
        self.image.seek(begin if to is None else to)
        self.image.write(self.octets[begin:end])

    def _hear_of_pieces(self) -> None:
        plain = os.pwrite

        def pwrite(*arguments: Any) -> int:
            size = plain(*arguments)
            self.written.release()
            return size

        os.pwrite = pwrite


def state(step: int, rank: int) -> bytes:
    """All that is in the buffer."""
    return random.Random(f"{step}/{rank}").randbytes(BUFFER_BYTES - 2) + b"[]"


def shard_name(rank: int) -> str:
    return f"__{rank}_0.distcp"
