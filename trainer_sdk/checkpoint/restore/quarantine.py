"""Quarantines a checkpoint if the loss is not finite soon after it was loaded.

States that were saved since that load come from the checkpoint, so they are quarantined as well,
also saves in progress once they are visible. Nothing is deleted, and a checkpoint is marked at most
once. If the loss is not finite again at the same step after another checkpoint was loaded, the
training itself is at fault, and nothing more is quarantined.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, SupportsFloat

from everstep.evidence.files import read_regular
from trainer_sdk.checkpoint.events import QuarantineEvent, Reporter
from trainer_sdk.checkpoint.image_folder import image_folders, mark_image
from trainer_sdk.checkpoint.manifest import (
    INDEX,
    BadManifestError,
    Identity,
    ImageIndex,
    decode,
    step_name,
    step_of,
)
from trainer_sdk.checkpoint.restore.choice import GLOBAL, MEMORY, Tier
from trainer_sdk.checkpoint.storage import Storage, StorageError
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark, look, quarantine

WITHIN_STEPS = 20
_CAUSE: Final = "nan_after_load"
_CORRUPT: Final = "corrupt"
_NUMERICS: Final = "numerics"


class BadLossError(Exception):
    """The loss is not finite soon after a load."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state that this rank has loaded, and where later states are saved."""

    identity: Identity
    tier: Tier
    round: int
    """The present round."""
    images: Path | None
    """The base folder of images on this node."""
    storage: Storage | None
    failed_before: frozenset[int]
    """Steps whose loss was not finite after earlier loads."""


class LossWatch:
    """Checks the loss of the first steps after a load."""

    def __init__(self, loaded: LoadedState, reporter: Reporter, rank: int, within: int) -> None:
        self._loaded = loaded
        self._reporter = reporter
        self._rank = rank
        self._left = within
        self._step = loaded.identity.step
        self._mark: CheckpointMark | None = None

    def see(self, loss: SupportsFloat, await_saves: Callable[[], object]) -> None:
        """Check the loss of the next step; `BadLossError` if it is not finite.

        Before the error it waits for saves in progress: the process may end at the error.
        """
        self._mark = None  # the script has caught the error, and the training goes on
        if not self._left:
            return
        self._left -= 1
        self._step += 1
        value = float(
            getattr(loss, "detach", lambda: loss)()
        )  # torch warns about the conversion of a tensor with gradients
        if math.isfinite(value):
            return
        self._left = 0
        step, tier = self._loaded.identity.step, self._loaded.tier
        finding = f"the loss is {value} at step {self._step}"
        if self._step in self._loaded.failed_before:
            raise BadLossError(
                f"{finding}, as it was after another checkpoint: look at the data of that step and "
                "at the learning rate; no checkpoint is at fault, and none is quarantined"
            )
        after = self._step - step
        reason = f"{finding}, {after} step{'s' if after > 1 else ''} after loading step {step}"
        self._mark = CheckpointMark(
            by=f"rank {self._rank}", reason=reason, cause=_CAUSE, at=_now(), failed_at=self._step
        )
        self.mark()
        if self._loaded.round:
            await_saves()
            self.mark()
        raise BadLossError(
            f"{reason} from the {tier} tier: that checkpoint is quarantined, and the next restore "
            "takes another tier or an older step"
        )

    def mark(self) -> None:
        """If the loss was not finite, quarantine the visible states that come from the load."""
        own, mark = self._loaded, self._mark
        if mark is None:
            return
        if own.tier == GLOBAL:
            self._mark_published(step_name(own.identity.step), mark)
        for _, folder in image_folders(own.images, self._rank):
            self._mark_image(folder, mark)
        for name in self._saved_since():
            self._mark_published(name, mark)

    def _saved_since(self) -> list[str]:
        own = self._loaded
        if own.storage is None or not own.round:
            return []
        try:
            names = own.storage.folders()
        except StorageError as error:
            self._reporter.warn(f"states saved since the load cannot be quarantined: {error}")
            return []
        return [name for name in names if (step_of(name) or 0) > own.identity.step]

    def _mark_image(self, folder: Path, mark: CheckpointMark) -> None:
        try:
            index = decode(read_regular(folder / INDEX), ImageIndex, str(folder))
        except (OSError, BadManifestError):
            return  # there is nothing to load
        if self._is_tainted(index.identity):
            mark_image(folder, index.identity, mark)
            self._tell(index.identity.step, MEMORY, str(folder), mark)

    def _mark_published(self, name: str, mark: CheckpointMark) -> None:
        storage = self._loaded.storage
        assert storage is not None
        try:
            there = look(storage, step_of(name) or 0)
            if there is None or there.manifest is None:
                return  # there is nothing to load
            if self._is_tainted(there.manifest.identity) and quarantine(storage, there, mark):
                self._tell(there.step, GLOBAL, there.path, mark)
        except StorageError as error:
            self._reporter.warn(f"{name} cannot be quarantined: {error}")

    def _is_tainted(self, identity: Identity) -> bool:
        """Whether it is the loaded state, or a later one of this round."""
        own = self._loaded
        return identity == own.identity or (
            identity.round == own.round != 0 and identity.step > own.identity.step
        )

    def _tell(self, step: int, tier: Tier, path: str, mark: CheckpointMark) -> None:
        _report(self._reporter, step, tier, path, _CAUSE, mark)


def _report(
    reporter: Reporter,
    step: int,
    tier: Tier,
    path: str,
    cause: Literal["nan_after_load", "corrupt", "numerics"],
    mark: CheckpointMark,
) -> None:
    reporter.report(
        QuarantineEvent(
            step=step, tier=tier, cause=cause, reason=mark.reason, path=path, by=mark.by
        )
    )


@dataclass(frozen=True, slots=True)
class SuspectStates:
    """States that a training has saved since its numbers went wrong."""

    from_step: int
    course: tuple[int, int]
    """The last course that has saved such states: a later one began from an older state."""
    reason: str

    def has(self, identity: Identity) -> bool:
        """Whether this state is one of them."""
        return identity.step >= self.from_step and identity.course <= self.course


def quarantine_suspects(
    suspects: SuspectStates,
    images: Path | None,
    storage: Storage | None,
    rank: int,
    reporter: Reporter,
) -> None:
    """Quarantine them: each rank its images, and rank 0 the visible checkpoints.

    `StorageError` if the checkpoints cannot be marked: a restore must not go on then.
    """
    by = f"rank {rank}"
    mark = CheckpointMark(by=by, reason=suspects.reason, cause=_NUMERICS, at=_now())
    for _, folder in image_folders(images, rank):
        try:
            index = decode(read_regular(folder / INDEX), ImageIndex, str(folder))
        except (OSError, BadManifestError):
            continue  # there is nothing to load
        if suspects.has(index.identity):
            mark_image(folder, index.identity, mark)
            _report(reporter, index.identity.step, MEMORY, str(folder), _NUMERICS, mark)
    if storage is None or rank:
        return
    for step in filter(None, map(step_of, storage.folders())):
        there = look(storage, step) if step >= suspects.from_step else None
        if there is None or there.manifest is None or not suspects.has(there.manifest.identity):
            continue
        if quarantine(storage, there, mark):
            _report(reporter, step, GLOBAL, there.path, _NUMERICS, mark)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def quarantine_corrupt(
    storage: Storage,
    name: str,
    identity: Identity | None,
    reason: str,
    rank: int,
    reporter: Reporter,
) -> None:
    """Quarantine a checkpoint whose files are damaged; `identity` is None if unknown.

    The next restore rejects it without reading it, and a save of the same step takes its place. A
    checkpoint that could not be read once, or does not fit this training, is left as it is.
    """
    step = step_of(name)
    assert step is not None
    mark = CheckpointMark(by=f"rank {rank}", reason=reason, cause=_CORRUPT, at=_now())
    try:
        there = look(storage, step)
        if there is None or (there.manifest and there.manifest.identity) != identity:
            return  # it was replaced in the meantime
        if not quarantine(storage, there, mark):
            return
    except StorageError as error:
        reporter.warn(f"{name} cannot be quarantined: {error}")
        return
    reporter.warn(f"{there.path} is quarantined, and no restore loads it: {reason}")
    _report(reporter, step, GLOBAL, there.path, _CORRUPT, mark)
