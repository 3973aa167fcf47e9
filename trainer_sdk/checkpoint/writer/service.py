"""Carries out the orders of a rank; each order has a thread, and one thread writes at a time.

An image is kept as soon as it is hashed, even if the write to the global tier fails.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Generator, Sequence

from everstep.hashing import Hasher
from trainer_sdk.checkpoint.manifest import BadManifestError
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.port import StorageError
from trainer_sdk.checkpoint.writer.disk import (
    GivenUpByRankError,
    StreamHash,
    WriteGate,
    hash_in_parts,
)
from trainer_sdk.checkpoint.writer.files import keep_image, place_of, write_file, write_shard
from trainer_sdk.checkpoint.writer.protocol import (
    BufferFilled,
    FromWriter,
    GiveUpSave,
    HurrySave,
    ImageKept,
    NextWindow,
    PartWritten,
    SaveDone,
    SaveFailed,
    SaveProgress,
    SaveStage,
    ToWriter,
    WriteFile,
    WriteState,
)
from trainer_sdk.checkpoint.writer.publication import GivenUpError, StepTakenError, settle
from trainer_sdk.checkpoint.writer.root_claim import (
    OtherLaunchError,
    OtherOwnerError,
    RootClaim,
    VanishedError,
)

TellRank = Callable[[FromWriter], None]
_REMEDIES = {
    errno.ENOSPC: "free some space (everstep ckpt gc), or save elsewhere",
    errno.EDQUOT: "have the quota raised, or keep fewer checkpoints",
    errno.EACCES: "let the user of the training write there",
    errno.EROFS: "give a folder that may be written",
    errno.EIO: "the disk has failed: save elsewhere",
    errno.ENOENT: "the folder was removed meanwhile",
    errno.ENXIO: "remove it",
    errno.EISDIR: "remove it",
    errno.ELOOP: "remove it",
}


class WriterService:
    """The work of a writer."""

    def __init__(self, tell: TellRank) -> None:
        self._tell = tell
        self._writing = threading.Lock()
        self._roots: dict[str, RootClaim] = {}
        self._mappings = _Mappings()
        self._gates: dict[int, WriteGate] = {}
        """The gates of the saves that are being written or waiting."""

    def take(self, order: ToWriter) -> None:
        """Begin an order, or pass a line on to its save; lines about an old save are ignored."""
        gate = self._gates.get(order.save)
        match order:
            case WriteState() | WriteFile():
                if isinstance(order, WriteState):
                    self._gates[order.save] = _gate(order)
                threading.Thread(target=self.work, args=(order,), daemon=True).start()
            case _ if gate is None:
                pass
            case BufferFilled():
                gate.arrived(order.end, order.stall_s)
            case GiveUpSave():
                gate.give_up()
            case HurrySave():
                gate.hurry()

    def work(self, order: WriteState | WriteFile) -> None:
        """Carry out an order, and report the result."""
        stage, failed = _Stage(), None
        try:
            match order:
                case WriteState():
                    self._write_state(order, stage)
                case WriteFile():
                    self._write_file(order, stage)
        except GivenUpByRankError:
            pass  # the rank has reported it itself
        # The rank must receive any error: it holds memory for this save.
        except Exception as error:  # noqa: BLE001
            failed = _failed(order, stage.name, error)
        self._gates.pop(order.save, None)  # before the report: the rank may send the order again
        if failed is not None:
            self._tell(failed)

    def _write_state(self, order: WriteState, stage: "_Stage") -> None:
        going = self._going(order.save, stage)
        octets = self._mappings.of(order.image)
        gate = self._gates.setdefault(order.save, _gate(order))

        def keep(hasher: Hasher) -> None:
            if order.keep:
                before, stage.name = stage.name, "hash"
                kept = keep_image(order, octets, hasher, going)
                self._tell(ImageKept(save=order.save, hash=kept))
                stage.name = before

        if not order.root:
            stage.name = "hash"
            hash_in_parts(octets[: order.file_bytes], StreamHash(order.file_bytes, keep), going)
            self._tell(PartWritten(save=order.save, size_bytes=order.file_bytes, write_s=0.0))
            return
        with self._writing:
            self._claim(order, stage)
            stage.name = "write"
            windows = self._windows(order, octets, gate)
            hashing = StreamHash(order.file_bytes, keep)
            write_s = write_shard(order, windows, hashing, gate, going)
        begin, length = order.metadata
        metadata = bytes(octets[begin : begin + length])
        self._tell(PartWritten(save=order.save, size_bytes=order.file_bytes, write_s=write_s))
        stage.name = "publish"

        def waiting(ranks: Sequence[int]) -> None:
            self._tell(SaveProgress(save=order.save, stage="publish", waits_for=tuple(ranks)))

        self._tell(settle(order, metadata, waiting))

    def _windows(
        self, order: WriteState, octets: memoryview, gate: WriteGate
    ) -> Generator[memoryview]:
        """The windows of the shard file, as they arrive; a single window if it is not in waves."""
        size = order.window_bytes or order.file_bytes or 1  # a rank may have nothing to write
        for at in range(0, order.file_bytes, size):
            end = min(at + size, order.file_bytes)
            if at:
                self._tell(NextWindow(save=order.save))
                gate.wait_for(end)
            yield octets[: end - at]

    def _claim(self, order: WriteState, stage: "_Stage") -> None:
        if order.root not in self._roots:
            stage.name = "publish"
            self._roots[order.root] = RootClaim(storage_for(order.root))
        self._roots[order.root].claim(order.identity.job, "" if order.rank else order.launch)

    def _write_file(self, order: WriteFile, stage: "_Stage") -> None:
        stage.name, going = "write", self._going(order.save, stage)
        octets, size, hasher = self._mappings.of(order.image), order.size_bytes, Hasher()
        with self._writing:
            write_file(order.path, octets, size, going)
            if order.is_hashed:  # of the buffer, which has not changed
                hash_in_parts(octets[:size], hasher, going)
        digest = hasher.hexdigest() if order.is_hashed else ""
        self._tell(PartWritten(save=order.save, size_bytes=size, write_s=0.0))
        self._tell(SaveDone(save=order.save, place=order.path, size_bytes=size, hash=digest))

    def _going(self, save: int, stage: "_Stage") -> Callable[[], None]:
        return lambda: self._tell(SaveProgress(save=save, stage=stage.name))


class _Stage:
    """The present stage, for the report of a failure."""

    name: SaveStage = "write"


def _gate(order: WriteState) -> WriteGate:
    there = 0 if order.is_filling else order.window_bytes or order.image_bytes
    return WriteGate(there, order.stall_s, order.bytes_per_s)


class _Mappings:
    """The mapped buffers: to map a buffer takes a tenth of the time of its write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        self._views: dict[tuple[int, int], memoryview] = {}

    def of(self, image: str) -> memoryview:
        """The bytes of a buffer. Mappings of another size are of replaced buffers: dropped."""
        descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            with self._lock:
                if about.st_size != self._size:
                    self._size = about.st_size
                    self._views.clear()
                key = about.st_dev, about.st_ino
                if key not in self._views:
                    self._views[key] = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
                return self._views[key]
        finally:
            os.close(descriptor)


def _place(order: WriteState | WriteFile) -> str:
    match order:
        case WriteState() if not order.root:
            return order.folder
        case WriteFile():
            return order.path
        case _:
            return place_of(order.root, order.saving, order.identity.step).path("").rstrip("/")


_NAMES: dict[type[Exception], str] = {
    OtherOwnerError: "other_owner",
    OtherLaunchError: "other_launch",
    StepTakenError: "taken",
    VanishedError: "ENOENT",
}
"""The names of errors that only a person can resolve."""


def _failed(order: WriteState | WriteFile, stage: SaveStage, error: Exception) -> SaveFailed:
    place = _place(order)
    folder = os.path.dirname(place)
    match error:
        case FileNotFoundError() if isinstance(order, WriteFile) and not os.path.isdir(folder):
            reason, name = f"there is no folder {folder}: make it, and save again", "ENOENT"
        case OSError(errno=int(number)):
            remedy = _REMEDIES.get(number, "look at the file system")
            file = f"{error.filename}: " if error.filename else ""
            reason, name = f"{file}{error.strerror}: {remedy}", errno.errorcode.get(number, "")
        case GivenUpError():
            reason, name = str(error), "timeout" if error.is_late else "other_rank"
        case OtherOwnerError() | OtherLaunchError() | StepTakenError() | VanishedError():
            reason, name = str(error), _NAMES[type(error)]
        case StorageError() | BadManifestError():
            cause = error.__cause__
            number = cause.errno if isinstance(cause, OSError) and cause.errno else 0
            reason, name = str(error), errno.errorcode.get(number, "storage")
        case _:
            reason, name = f"{type(error).__name__}: {error}", "writer"
    return SaveFailed(save=order.save, stage=stage, reason=reason, error=name, place=place)
