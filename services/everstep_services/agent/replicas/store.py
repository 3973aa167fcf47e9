"""The copies that this node holds of other nodes' states, or has fetched. Call all in threads.

    held/slot-<S>/rank-<R>/<step>-<hash>/  a whole copy: image and index.json, or part and part.json
    held/slot-<S>/rank-<R>/incoming/       a copy that is being received

The two newest copies of each rank are kept; the memory of the older one takes the next. So an old
step leaves only when a newer one is complete. Abandoned states count as older than any other.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.evidence.files import read_regular
from everstep.hashing import Hasher
from everstep_services.agent.replicas.displacement import ImageSender, TrainingLine
from everstep_services.agent.replicas.images import ImageHead, read_head
from everstep_services.agent.replicas.memory_file import MemoryFile
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.transfer.protocol import Copy, ReplicaError
from trainer_sdk.checkpoint.image_folder import ASIDE_INDEX, put_durably, sync_file, sync_names
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX

log = logging.getLogger(__name__)

INCOMING = "incoming"
PART, PART_INDEX = "part", "part.json"


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A whole copy, verified when it was received."""

    copy: Copy
    head: ImageHead
    folder: Path
    memory: MemoryFile | None = None
    """The memory that was written; None for copies that an earlier agent has left."""

    @property
    def path(self) -> Path:
        """The file with its bytes."""
        return self.folder / (IMAGE if self.copy.parts == 1 else PART)


def write_index(folder: Path, copy: Copy) -> None:
    """Make a whole copy visible."""
    is_whole = copy.parts == 1
    name = INDEX if is_whole else PART_INDEX
    octets = copy.index if is_whole else msgspec.json.encode(copy)
    put_durably(folder / name, octets)


def unindex(folder: Path) -> None:
    """Make a copy invisible before it is changed."""
    for name in (ASIDE_INDEX, INDEX, PART_INDEX):
        (folder / name).unlink(missing_ok=True)


def found(base: Path, job: str) -> Iterator[HeldCopy]:
    """The copies that an earlier agent has left here. An unfinished one is removed."""
    for place in base.glob("slot-*/rank-*/*"):
        try:
            yield _read(place, job)
        except (OSError, ValueError, msgspec.MsgspecError, ReplicaError) as error:
            log.info("held_passed_over path=%s error=%s", place, error)
            shutil.rmtree(place, ignore_errors=True)


def _read(place: Path, job: str) -> HeldCopy:
    if place.name == INCOMING:
        raise ReplicaError("it was being received")
    if (place / PART_INDEX).exists():
        copy = msgspec.json.decode(read_regular(place / PART_INDEX), type=Copy)
        head = read_head(copy.index)
    else:
        index = read_regular(place / INDEX)
        head = read_head(index)
        slot = int(place.parent.parent.name.removeprefix("slot-"))
        copy = Copy(
            slot=slot, rank=head.rank, ranks=0, step=head.identity.step,
            size_bytes=head.size_bytes, hash=head.hash, index=index,
        )  # fmt: skip
    if head.identity.job != job:
        raise ReplicaError(f"it is of job {head.identity.job}")
    return HeldCopy(copy, head, place)


_KEPT = 2
_ABOVE_RANK = 3
"""Folders above a rank's that may be new, too: its slot's, held/, and the agent's own."""
Owner = tuple[int, int]
"""A slot, and one of its ranks."""


@dataclass(slots=True)
class Incoming:
    """A copy that is being received, or was when the connection broke."""

    copy: Copy
    head: ImageHead
    path: Path
    memory: MemoryFile
    present: int = 0
    """The bytes of memory that it has taken over from an older copy."""
    offset: int = 0
    is_busy: bool = True
    sender: ImageSender | None = None
    hash: Hasher = field(default_factory=Hasher)

    def room(self, most: int) -> memoryview:
        """A buffer for the next bytes; empty at the end."""
        return self.memory.room(self.offset, min(most, self.copy.size_bytes - self.offset))

    def took(self, piece: memoryview) -> None:
        """The buffer is filled."""
        self.memory.wrote(self.offset, piece)
        self.hash.update(piece)
        self.offset += len(piece)

    def start_over(self) -> None:
        """The bytes differ from the announced hash: begin again."""
        self.offset, self.hash = 0, Hasher()
        self.memory.begin_again(self.path)


class ReplicaStore:
    """All copies; safe for several threads. One thread at a time receives a given copy."""

    def __init__(self, base: Path, job: str, settings: CheckpointSettings) -> None:
        self._base = base / "held"
        self._job = job
        self._settings = settings
        self._lock = threading.Lock()
        self._held: dict[Owner, list[HeldCopy]] = {}
        self._incoming: dict[Owner, Incoming] = {}
        self._courses: dict[Owner, TrainingLine] = {}
        self._touched: set[int] = set()
        """Slots that have sent something in this round."""
        for held in found(self._base, job):
            self._held.setdefault((held.copy.slot, held.copy.rank), []).append(held)

    def begins(self) -> None:
        """A new round begins."""
        self._touched = set()

    @property
    def size_bytes(self) -> int:
        """The memory that all copies take."""
        with self._lock:
            return self._size()

    def of_rank(self, rank: int) -> list[HeldCopy]:
        """Copies of a rank's state, newest first; abandoned ones only if there is no other."""
        with self._lock:
            copies = [
                held
                for owner, each in self._held.items()
                if owner[1] == rank
                for held in self._going_on(owner, each)
            ]
        return sorted(copies, key=lambda held: held.head.age, reverse=True)

    def of_slot(self, slot: int, step: int) -> list[HeldCopy]:
        """For each rank of a slot, its newest copy or part of a step."""
        with self._lock:
            copies = [
                [stored for stored in each if stored.copy.step == step]
                for (owner, _), each in self._held.items()
                if owner == slot
            ]
        return [max(each, key=lambda stored: stored.head.age) for each in copies if each]

    def has_all(self, held: HeldCopy) -> bool:
        """The copies of all ranks of its slot are here, of the same round and step."""
        copy, age = held.copy, held.head.age
        same = [stored for stored in self.of_slot(copy.slot, copy.step) if stored.head.age == age]
        return len(same) == copy.ranks

    def begin(self, copy: Copy, sender: ImageSender | None = None) -> Incoming | None:
        """Receive a copy from its offset on; None if it is here. Raises `ReplicaError` if refused.

        Without a sender, this node itself fetches it.
        """
        head = self._checked(copy)
        owner = (copy.slot, copy.rank)
        with self._lock:
            if sender is not None and not self._course(owner).hear(sender):
                raise ReplicaError(f"round {sender.round} is over: a later one sends here", "round")
            self._touched.add(copy.slot)
            held = self._held.get(owner, [])
            if any(
                stored.copy.hash == copy.hash and stored.copy.step == copy.step for stored in held
            ):
                return None
            going_on = self._incoming.get(owner)
            if going_on is not None and going_on.is_busy:
                _overtake(going_on.sender, sender)
                raise ReplicaError(f"rank {copy.rank} is being received already", "busy")
            if going_on is not None and going_on.copy == copy:
                going_on.is_busy, going_on.sender = True, sender
                return going_on
            others = [copy.head.identity for copy in held]
            if sender is not None and (why := self._course(owner).refusal(head.identity, others)):
                raise ReplicaError(f"step {copy.step} is not taken: {why}", "old")
            incoming = self._allocate(owner, copy, head)
            incoming.sender = sender
            return incoming

    def finish(self, incoming: Incoming, hashed: str = "") -> HeldCopy:
        """Verify the copy, and make it visible. Raises `ReplicaError` if its hash differs.

        `hashed` is the hash of its bytes, if another process has written them.
        """
        copy = incoming.copy
        if (hashed or incoming.hash.hexdigest()) != copy.hash:
            incoming.start_over()
            raise ReplicaError(
                f"step {copy.step} of rank {copy.rank} came with other bytes than its hash "
                f"{copy.hash}: it was changed meanwhile, or on its way",
                "torn",
            )
        sync_file(incoming.path)
        with self._lock:
            owner = (copy.slot, copy.rank)
            folder, others = self._folder(owner), self._held.setdefault(owner, [])
            target = folder / f"{copy.step}-{copy.hash}"
            write_index(folder / INCOMING, copy)
            (folder / INCOMING).rename(target)
            sync_names(folder, _ABOVE_RANK)
            held = HeldCopy(copy, incoming.head, target, incoming.memory)
            self._forget(owner, [other for other in others if other.head.age == held.head.age])
            others.append(held)
            del self._incoming[owner]
        return held

    def pause(self, incoming: Incoming) -> None:
        """Nobody receives it now; it may continue where it ended."""
        incoming.is_busy = False

    def drop(self, slot: int, *, before: tuple[int, int, int]) -> int:
        """Forget the states of a slot that are older than `before`; return the bytes freed."""
        with self._lock:
            size = self._size()
            for owner in [owner for owner in self._held if owner[0] == slot]:
                gone = [held for held in self._held[owner] if held.head.age < before]
                self._forget(owner, gone)
            return size - self._size()

    def close(self) -> None:
        """Receive nothing more."""
        for incoming in self._incoming.values():
            incoming.memory.close()

    # -- inside; the lock is held ----------------------------------------------------------------

    def _checked(self, copy: Copy) -> ImageHead:
        head = read_head(copy.index)
        is_whole = copy.parts == 1
        if (
            head.identity.job != self._job
            or head.rank != copy.rank
            or head.identity.step != copy.step
            or copy.size_bytes < 1
            or (is_whole and (head.size_bytes, head.hash) != (copy.size_bytes, copy.hash))
        ):
            whose = f"job {head.identity.job}, rank {head.rank}, step {head.identity.step}"
            raise ReplicaError(
                f"what was announced as step {copy.step} of rank {copy.rank} of job {self._job} is "
                f"of {whose}, or of another size or hash: it is not taken",
                "foreign",
            )
        return head

    def _allocate(self, owner: Owner, copy: Copy, head: ImageHead) -> Incoming:
        """Memory for a copy: that of the least valuable one, if there are enough, or new memory."""
        folder = self._folder(owner)
        place, path = folder / INCOMING, folder / INCOMING / (IMAGE if copy.parts == 1 else PART)
        self._give_up(owner)
        course = self._course(owner)
        held = sorted(self._held.get(owner, ()), key=lambda copy: course.worth(copy.head.identity))
        oldest = held[0] if len(held) >= _KEPT else None
        present = 0 if oldest is None else oldest.copy.size_bytes
        self._need_room(copy, copy.size_bytes - present, owner, head)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if oldest is None:
            place.mkdir(mode=0o700)
        else:
            unindex(oldest.folder)
            oldest.folder.rename(place)
            (place / oldest.path.name).rename(path)
            self._held[owner].remove(oldest)
        memory = None if oldest is None else oldest.memory
        if memory is None or memory.size_bytes != copy.size_bytes:
            memory = MemoryFile(path, copy.size_bytes)
        memory.begin_again(path)
        incoming = Incoming(copy, head, path, memory, min(present, copy.size_bytes))
        self._incoming[owner] = incoming
        return incoming

    def _course(self, owner: Owner) -> TrainingLine:
        return self._courses.setdefault(owner, TrainingLine())

    def _going_on(self, owner: Owner, held: list[HeldCopy]) -> list[HeldCopy]:
        """The copies that a training may come back to; all of them, if there is none."""
        course = self._course(owner)
        return [copy for copy in held if not course.has_left(copy.head.identity)] or held

    def _give_up(self, owner: Owner) -> None:
        """Give up a copy whose transfer is overtaken."""
        incoming = self._incoming.pop(owner, None)
        if incoming is not None:
            incoming.memory.close()
            shutil.rmtree(incoming.path.parent, ignore_errors=True)

    def _need_room(self, copy: Copy, more: int, owner: Owner, head: ImageHead) -> None:
        if more <= 0 or self._room() >= more:
            return
        for other, each in list(self._held.items()):
            # a slot that has sent nothing in this round holds its states elsewhere by now
            if other[0] not in self._touched and other[0] != owner[0]:
                self._forget(other, [held for held in each if held.head.age < head.age])
        room = self._room()
        if room < more:
            raise ReplicaError(
                f"step {copy.step} of rank {copy.rank} needs {more} bytes more, and {max(room, 0)} "
                f"may be taken: raise agent.checkpoints.held_most_bytes, or enlarge what "
                f"agent.checkpoints.{self._settings.states_setting} is in",
                "quota",
            )

    def _room(self) -> int:
        """How much more memory may be taken."""
        about = os.statvfs(self._base.parent)
        unwritten = sum(
            stored.copy.size_bytes - max(stored.offset, stored.present)
            for stored in self._incoming.values()
        )
        free = about.f_bavail * about.f_frsize - unwritten - self._settings.room_least_bytes
        most = self._settings.held_most_bytes
        return free if most is None else min(free, most - self._size())

    def _size(self) -> int:
        held = sum(stored.copy.size_bytes for each in self._held.values() for stored in each)
        return held + sum(stored.copy.size_bytes for stored in self._incoming.values())

    def _folder(self, owner: Owner) -> Path:
        return self._base / f"slot-{owner[0]}" / f"rank-{owner[1]}"

    def _forget(self, owner: Owner, gone: Iterable[HeldCopy]) -> None:
        for held in gone:
            unindex(held.folder)
            shutil.rmtree(held.folder, ignore_errors=True)
            self._held[owner].remove(held)


def _overtake(before: ImageSender | None, sender: ImageSender | None) -> None:
    """End a connection of an earlier round, which may hang: the next attempt finds room."""
    if before is not None and sender is not None and before.round < sender.round:
        before.abort()
