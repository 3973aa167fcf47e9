"""Finds the states that can be restored: images on this node, manifests in the global tier."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Protocol

import msgspec

from everstep.evidence.files import read_regular
from everstep.hashing import hash_of
from trainer_sdk.checkpoint.image_folder import (
    image_folders,
    is_on_disk,
    marked_image,
    read_document,
)
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    MANIFEST,
    BadManifestError,
    Identity,
    ImageIndex,
    Manifest,
    NewerManifestError,
    decode,
    step_of,
)
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.choice import (
    DISK,
    GLOBAL,
    MEMORY,
    JobPast,
    RejectedState,
    Sight,
    StateOffer,
    Tier,
)
from trainer_sdk.checkpoint.restore.errors import CorruptError, UnfitError
from trainer_sdk.checkpoint.restore.optimizer_state import Form
from trainer_sdk.checkpoint.restore.stored_image import StoredImage, forms_of
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import QUARANTINED, CheckpointMark
from trainer_sdk.checkpoint.storage.port import MissingError

OFFER = "offer.json"
"""The agent writes it when it has fetched what it can."""
RAN_S, FAILURES, RESTARTS = "ran_s", "failures", "restarts"
"""The names of the texts in a manifest that have the job's past, as in `JobPast`."""
_AGENT_WITHIN_S = 900.0
"""Longer than an agent takes; a rank that has lost its agent is killed by its warden."""
_LOOK_EVERY_S = 0.02
_MOST = 2
"""The number of images to verify early: other nodes may lack the newest."""


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """Which rank restores, and where it looks for states."""

    job: str
    round: int
    """0 if no agent counts rounds."""
    rank: int
    world_size: int
    images: Path | None
    """The base folder of images on this node; None if images are not kept."""
    storage: Storage | None
    """The global tier."""
    agent_within_s: float = 0.0
    """How long the node's agent may fetch images from other nodes; 0 without an agent."""

    @classmethod
    def of(
        cls, about: JobContext, group: RankGroup, root: str, *, has_images: bool
    ) -> "RestoreContext":
        """The context of this rank in the job."""
        return cls(
            job=about.job,
            round=about.round if about.is_counted else 0,
            rank=group.rank,
            world_size=group.size,
            images=Path(about.images) if has_images else None,
            storage=storage_for(root) if root else None,
            agent_within_s=_AGENT_WITHIN_S if about.has_keeper else 0.0,
        )


class _Lost(msgspec.Struct):
    step: int
    reason: str


class _Offering(msgspec.Struct):
    round: int
    complete: bool
    reason: str = ""
    is_sure: bool = True
    lost: _Lost | None = None


def wait_for_agent(context: RestoreContext, is_over: Event | None = None) -> str:
    """Wait until the agent has fetched what it can for this round, or `is_over` is set.

    Returns why other nodes may have states in memory that cannot be fetched; empty if none may.
    """
    is_over = is_over or Event()
    deadline = monotonic() + context.agent_within_s
    while context.images is not None and context.agent_within_s:
        offering = read_document(context.images / OFFER, _Offering)
        if offering is not None and offering.round >= context.round:
            return "" if offering.complete or offering.is_sure else offering.reason
        if monotonic() > deadline:
            return f"the agent has fetched nothing within {context.agent_within_s:g} s"
        if is_over.wait(_LOOK_EVERY_S):
            break
    return ""


Forms = Mapping[str, Form | None]
"""The form of each tensor of an image, by key; None for another value."""


def lost_images(context: RestoreContext) -> Sight:
    """The state that was in this node's memory and is lost, as its agent reports."""
    if context.images is None or not context.agent_within_s:
        return Sight()
    offering = read_document(context.images / OFFER, _Offering)
    if offering is None or offering.complete or offering.lost is None:
        return Sight()
    return Sight(
        passed=(
            RejectedState(
                step=offering.lost.step, tier=_own_tier(context), reason=offering.lost.reason
            ),
        )
    )


def see_images(context: RestoreContext) -> tuple[Sight, dict[Identity, Forms]]:
    """A rank's images on this node, and the forms of their tensors."""
    forms: dict[Identity, Forms] = {}
    offers, passed, suspect, failed_at = [], [], [], []
    for kept, folder in image_folders(context.images, context.rank):
        tier = _own_tier(context) if kept == MEMORY else kept
        marked = marked_image(folder)
        if marked is not None:
            suspect.append(marked.identity)
            failed_at.append(marked.mark.failed_at)
            step, reason = marked.identity.step, f"{folder} is quarantined: {marked.mark.reason}"
            passed.append(RejectedState(step=step, tier=tier, rank=context.rank, reason=reason))
        index = _index(folder / INDEX)
        if index is None:
            continue  # the image is being written
        try:
            offers.append(_offer(context, tier, folder, index))
            if isinstance(index, ImageIndex):
                forms[index.identity] = forms_of(index)
        except UnfitError as unfit:
            step = index.identity.step if isinstance(index, ImageIndex) else 0
            passed.append(RejectedState(step=step, tier=tier, rank=context.rank, reason=str(unfit)))
    sight = Sight(
        offers=tuple(offers),
        passed=tuple(passed),
        suspect=tuple(suspect),
        failed_at=tuple(step for step in failed_at if step is not None),
    )
    return sight, forms


def _own_tier(context: RestoreContext) -> Tier:
    """The tier of a rank's own images: their agent marks a folder that is on a disk."""
    return DISK if context.images is not None and is_on_disk(context.images) else MEMORY


def published_steps(storage: Storage) -> list[str]:
    """The names of all steps in the global tier, newest first."""
    steps = [(step, name) for name in storage.folders() if (step := step_of(name)) is not None]
    return [name for _, name in sorted(steps, reverse=True)]


def see_published(storage: Storage, job: str, names: Sequence[str]) -> Sight:
    """Which of these steps can be loaded, and why the others cannot."""
    sight = Sight()
    for name in names:
        try:
            mark = _published_mark(storage, name)  # before the manifest, as in `checkpoints.look`
            octets = _manifest_octets(storage, name)
            if mark is not None and mark.is_about(hash_of(octets)):
                reason = f"{storage.url}/{name} is quarantined: {mark.reason}"
                sight = sight.with_more(_passed(storage, name, reason))
                if mark.failed_at is not None:
                    sight = sight.with_more(Sight(failed_at=(mark.failed_at,)))
                continue
            manifest = _manifest(storage, job, name, octets)
        except (UnfitError, StorageError) as error:
            is_corrupt = isinstance(error, CorruptError)
            sight = sight.with_more(_passed(storage, name, str(error), is_corrupt=is_corrupt))
        else:
            offer = StateOffer(identity=manifest.identity, tier=GLOBAL, place=name)
            sight = sight.with_more(Sight(offers=(offer,), past=_past(manifest)))
    return sight


def _passed(storage: Storage, name: str, reason: str, *, is_corrupt: bool = False) -> Sight:
    passed = RejectedState(
        step=step_of(name) or 0,
        tier=GLOBAL,
        rank=0,
        reason=reason,
        path=f"{storage.url}/{name}",
        is_corrupt=is_corrupt,
    )
    return Sight(passed=(passed,))


def _past(manifest: Manifest) -> JobPast:
    texts = manifest.user
    try:
        return JobPast(
            float(texts.get(RAN_S, 0.0)), int(texts.get(FAILURES, 0)), int(texts.get(RESTARTS, 0))
        )
    except ValueError:
        return JobPast()


def _published_mark(storage: Storage, name: str) -> CheckpointMark | None:
    try:
        return msgspec.json.decode(storage.read(f"{name}/{QUARANTINED}"), type=CheckpointMark)
    except MissingError:
        return None
    except msgspec.DecodeError:
        return CheckpointMark(reason=f"{QUARANTINED} in it cannot be read")


def _manifest_octets(storage: Storage, name: str) -> bytes:
    try:
        return storage.read(f"{name}/{MANIFEST}")
    except MissingError:
        place = f"{storage.url}/{name}"
        raise UnfitError(f"{place} has no {MANIFEST}: it was never complete") from None


def _manifest(storage: Storage, job: str, name: str, octets: bytes) -> Manifest:
    place = f"{storage.url}/{name}"
    try:
        manifest = decode(octets, Manifest, f"{place}/{MANIFEST}")
    except NewerManifestError as error:
        raise UnfitError(str(error)) from error
    except BadManifestError as error:
        raise CorruptError(str(error)) from error
    identity = manifest.identity
    if identity.job != job:
        raise UnfitError(
            f"{place} is of job {identity.job}, and this is {job}: give another path, or "
            f"job={identity.job!r} to go on with it"
        )
    if identity.step != step_of(name):
        raise UnfitError(f"{place} holds step {identity.step}: it was renamed")
    return manifest


def _index(path: Path) -> ImageIndex | str | None:
    """The index of an image; None if there is none, and the reason if it cannot be read."""
    try:
        return decode(read_regular(path), ImageIndex, str(path))
    except FileNotFoundError:
        return None
    except (OSError, BadManifestError) as error:
        return str(error)


def _offer(
    context: RestoreContext, tier: Tier, folder: Path, index: ImageIndex | str
) -> StateOffer:
    if isinstance(index, str):
        raise UnfitError(index)
    identity = index.identity
    fields = (
        ("job", identity.job, context.job),
        ("rank", index.rank, context.rank),
        ("a world of size", identity.world_size, context.world_size),
    )
    for field, saved, wanted in fields:
        if saved != wanted:
            raise UnfitError(f"{folder} is of {field} {saved}, and this is {field} {wanted}")
    if context.round and identity.round > context.round:
        raise UnfitError(
            f"{folder} is of round {identity.round}, and this is round {context.round}"
        )
    try:
        size = (folder / IMAGE).stat().st_size
    except OSError as error:
        raise UnfitError(f"{folder / IMAGE} cannot be read: {error.strerror}") from error
    if size < index.size_bytes:
        raise UnfitError(f"{folder / IMAGE} is cut short: {size} of {index.size_bytes} bytes")
    return StateOffer(identity=identity, tier=tier, place=str(folder))


class VerifiedImages(Protocol):
    """Images that were verified before the ranks choose a state."""

    def image(self, offer: StateOffer) -> StoredImage | None:
        """The chosen image, if it is verified; the caller must close it."""

    def close(self) -> None:
        """Close the images that `image` has not returned."""


class EarlyVerification:
    """Verifies a rank's newest images in a thread, until the ranks choose one.

    It begins when the agent has fetched its images, while the script still builds the model.
    """

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self._found: dict[StateOffer, StoredImage] = {}
        self._checking: StateOffer | None = None
        self._news = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def image(self, offer: StateOffer) -> StoredImage | None:
        """The chosen image, if it was verified; the caller must close it.

        If the image is being verified, this waits for the result. It ends all other verification.
        """
        with self._news:
            if self._checking != offer:
                self._is_over.set()
            self._news.wait_for(lambda: self._checking != offer)
            self._is_over.set()
            return self._found.pop(offer, None)

    def close(self) -> None:
        """End the verification, and close the images that `image` has not returned."""
        self._is_over.set()
        self._thread.join()
        for image in self._found.values():
            image.close()
        self._found.clear()

    def _verify(self) -> None:
        wait_for_agent(self._context, self._is_over)
        sight, _ = see_images(self._context)
        newest = sorted(sight.offers, key=lambda offer: offer.identity.age, reverse=True)
        for offer in newest[:_MOST]:
            with self._news:
                if self._is_over.is_set():
                    return
                self._checking = offer
            try:
                self._check(offer)
            finally:  # the restore waits for this
                with self._news:
                    self._checking = None
                    self._news.notify_all()

    def _check(self, offer: StateOffer) -> None:
        image = StoredImage(offer.place, offer.identity)
        try:
            image.verify(self._is_over)
        except UnfitError:
            image.close()  # the restore finds the damage again, and reports it
        else:
            self._found[offer] = image
