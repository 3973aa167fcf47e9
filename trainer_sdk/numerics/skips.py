"""The acts of a job on its numerics, in `numerics.json` next to its checkpoints.

Rank 0 writes an act before any rank acts on it, so a process that is killed at any point leaves
either nothing or the whole act. A later round reads it: it skips the same data, and no data twice,
and it quarantines what the roll-back had no time for.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.image_folder import NUMERICS
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import Storage, StorageError
from trainer_sdk.checkpoint.storage.port import MissingError

_VERSION = 1
Positions = tuple[int, int]
"""Data positions `[from, to)`."""


class KeptResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank had computed in a step, bit for bit."""

    node: str
    device: str
    inputs: str
    """As of `RankResults`."""
    loss: int
    norm: int | None
    hashes: tuple[int, ...]


class KeptStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all ranks had computed in a step before they moved, and what was unexpected of it."""

    round: int
    signal: str
    value: int
    low: int | None = None
    high: int | None = None
    moved_at: int
    results: tuple[KeptResult, ...]
    """By rank."""


class ActRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An act that all ranks agreed on."""

    case: str
    """Made by rank 0; the same act of the same case is recorded once."""
    action: str
    """`rollback`, `skip`, `exclude`, `move` or `stop`."""
    step: int
    """The step whose result led to it."""
    reason: str
    at: str
    """UTC, for people."""
    before_step: int | None = None
    """Of a roll-back: checkpoints from this step on are quarantined."""
    course: tuple[int, int] = (0, 0)
    """The last `Identity.course` whose checkpoints that concerns."""
    samples: Positions | None = None
    """The data since the statistic moved; a skip passes over it."""
    is_quarantined: bool = False
    """Whether all of those checkpoints are quarantined."""
    kept: KeptStep | None = None
    """Of a move: what is compared on the other nodes, until that is done."""


class ActsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `numerics.json`."""

    acts: tuple[ActRecord, ...]
    hash: str
    """Of the acts as JSON; another text is not what was written."""
    version: int = _VERSION


class ActsError(Exception):
    """`numerics.json` cannot be read, so nobody knows what must not be used."""


class Skips:
    """The acts of a job. All ranks make it, and change it, together."""

    def __init__(self, storage: Storage | None, group: RankGroup) -> None:
        self._storage = storage
        self._group = group
        self.acts: tuple[ActRecord, ...] = ()
        """All acts of the job, in all its rounds, the oldest first."""
        self._load()

    @property
    def spans(self) -> tuple[Positions, ...]:
        """The data that nobody trains on."""
        skips = (act.samples for act in self.acts if act.action == "skip")
        return tuple(samples for samples in skips if samples is not None)

    @property
    def unfinished(self) -> tuple[ActRecord, ...]:
        """The roll-backs whose checkpoints may not all be quarantined."""
        return tuple(
            act for act in self.acts if act.before_step is not None and not act.is_quarantined
        )

    def add(self, act: ActRecord) -> str:
        """Record an act durably, on all ranks; returns why that failed, or nothing."""
        if any((other.case, other.action) == (act.case, act.action) for other in self.acts):
            return ""
        return self._put((*self.acts, act))

    def quarantined(self) -> None:
        """Record that the checkpoints of all roll-backs are quarantined."""
        if unfinished := self.unfinished:
            self._put([_changed(it, is_quarantined=True) if it in unfinished else it
                       for it in self.acts])  # fmt: skip

    @property
    def moved(self) -> ActRecord | None:
        """The last move whose step was not compared yet."""
        return next((act for act in reversed(self.acts) if act.kept is not None), None)

    def compared(self) -> None:
        """Record that nothing is left to compare."""
        self._put([_changed(act, kept=None) for act in self.acts])

    def _put(self, acts: Sequence[ActRecord]) -> str:
        why = ""
        if not self._group.rank and self._storage is not None:
            try:
                self._storage.put(NUMERICS, (_encoded(acts),))
            except (StorageError, OSError) as error:
                why = str(error)
        why = self._group.follow(why, str)
        if not why:
            self.acts = tuple(acts)
        return why

    def _load(self) -> None:
        acts: tuple[ActRecord, ...] = ()
        why = ""
        if not self._group.rank and self._storage is not None:
            try:
                acts = _read(self._storage)
            except (ActsError, StorageError) as error:
                why = str(error)
        why, self.acts = self._group.follow((why, acts), tuple[str, tuple[ActRecord, ...]])
        if why:
            raise ActsError(why)


def _changed(act: ActRecord, **fields: Any) -> ActRecord:
    return msgspec.structs.replace(act, **fields)


def _encoded(acts: Sequence[ActRecord]) -> bytes:
    whole = ActsFile(acts=tuple(acts), hash=hash_of(msgspec.json.encode(acts)))
    return msgspec.json.encode(whole)


def _read(storage: Storage) -> tuple[ActRecord, ...]:
    try:
        octets = storage.read(NUMERICS)
    except MissingError:
        return ()
    place = f"{storage.url}/{NUMERICS}"
    remedy = (
        "it names the data and the checkpoints that no rank may use: put a whole copy back, or "
        "remove it to train on all data again"
    )
    try:
        file = msgspec.json.decode(octets, type=ActsFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ActsError(f"{place} is not what was written ({error}), and {remedy}") from error
    if file.version > _VERSION:
        raise ActsError(f"{place} is of a newer release, and {remedy}")
    if file.hash != hash_of(msgspec.json.encode(file.acts)):
        raise ActsError(f"{place} is not what was written (its hash is another), and {remedy}")
    return file.acts
