"""The newest state that all ranks have, each in its nearest tier; and what was restored last."""

import traceback
from time import monotonic

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from everstep.hashing import hash_of
from trainer_sdk import layout
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.restore.agreement import StateSource
from trainer_sdk.checkpoint.restore.choice import RejectedState, RestoreChoice, StateOffer, Tier
from trainer_sdk.checkpoint.restore.discovery import RestoreContext
from trainer_sdk.checkpoint.restore.restore import ReadShare, Restore
from trainer_sdk.checkpoint.restore.restorer import note_round
from trainer_sdk.checkpoint.restore.stored_image import ImageStamp, StoredImage
from trainer_sdk.checkpoint.restore.stored_shards import StoredShards
from trainer_sdk.environment import environ
from trainer_sdk.integrations.dcp.image import DcpImage, WholeItem
from trainer_sdk.rank_session import session
from trainer_sdk.sdk_log import warn

_restored: dict[str, Identity] = {}
"""The state that this process has loaded last, by root: newer images are abandoned."""
_verified: dict[str, ImageStamp] = {}
"""The image that `newest_verified` has verified last, by root, for the load that follows."""

_WRAPPER = "_DistWrapper"
"""Torch's private class for the ranks of one save or load; without it nothing is checked."""


def require_all_ranks() -> None:
    """`ValueError` unless torch saves or loads on all ranks: otherwise some would wait for others.

    Torch tells no storage how many ranks act, so this takes the number from torch's own variable.
    """
    ranks = next(
        (
            value.get_world_size()
            for frame, _ in traceback.walk_stack(None)
            for value in frame.f_locals.values()
            if type(value).__name__ == _WRAPPER
        ),
        None,
    )
    text = environ.get("WORLD_SIZE", "")
    in_group = dist.get_world_size() if dist.is_initialized() else 1
    world_size = int(text) if text.isdecimal() else in_group
    if ranks not in {None, world_size}:
        raise ValueError(
            f"keep_memory=True is for all ranks together, and {ranks} of {world_size} ranks are "
            "here: call torch without no_dist and in a process group of all ranks, or give "
            "keep_memory=False"
        )


def note_restored(root: str, identity: Identity, round_: int) -> None:
    """Note that the training continues from this state; later saves are of this round or later."""
    _restored[root] = identity
    note_round(root, round_)


def restored_from(root: str) -> Identity | None:
    """The state from which the training continues; None if none was loaded from this root."""
    return _restored.get(root)


def note_verified(root: str, stamp: ImageStamp | None) -> None:
    """Note the image that this rank has verified, so that the next load need not do it again."""
    if stamp is not None:
        _verified[root] = stamp


def take_verified(root: str) -> ImageStamp | None:
    """The image that this rank has verified before this load; each is returned once."""
    return _verified.pop(root, None)


class _ImageVerifiedBefore:
    """The image that `newest_verified` has verified, for the load that follows."""

    def __init__(self, stamp: ImageStamp) -> None:
        self._stamp = stamp

    def image(self, offer: StateOffer) -> StoredImage | None:
        """The chosen image, if it is that image, and it has not changed since."""
        image = StoredImage(offer.place, offer.identity)
        return image if image.reopen(self._stamp) else None

    def close(self) -> None:
        """Do nothing: `image` is called for the chosen image only."""


class NearestState:
    """The newest state, or that of a step, that all ranks have and have verified.

    All ranks construct it together, in their default process group. With `misfit`, images are left
    out, as the load cannot use that one.
    """

    def __init__(
        self,
        root: str,
        step: int | None,
        job: str,
        *,
        before: ImageStamp | None = None,
        misfit: RejectedState | None = None,
    ) -> None:
        context = read_job_context(environ, job, root)
        self._root, self._step, self._job = root, step, job
        self._round = context.round if context.is_counted else 0
        self._group = group_of_all(environ.get("WORLD_SIZE", ""))
        reporter = Reporter(self._group.rank, session()._link)  # noqa: SLF001 - one package
        about = RestoreContext.of(context, self._group, root, has_images=misfit is None)
        early = None if before is None else _ImageVerifiedBefore(before)
        self._restore = Restore(about, self._group, reporter, step, early)
        if misfit is not None:
            self._restore.reject(misfit)
        self._is_counted = context.is_counted
        self._image: DcpImage | None = None
        self._others: dict[str, WholeItem] = {}
        """The tensors and values in the images of other ranks."""
        self._least_round = 0
        self.choice = self._choose(is_misfit=misfit is not None)
        """None for a fresh start."""

    @property
    def tier(self) -> Tier:
        """The tier from which this rank loads: `memory`, `disk`, `peer` or `global`."""
        return self._chosen.offers[self._group.rank].tier

    @property
    def image(self) -> DcpImage | None:
        """The image that this rank loads; None if it loads from the global tier."""
        source = self._restore.source(self._chosen)
        if self._image is None and isinstance(source, StoredImage):
            self._image = DcpImage(source)
        return self._image

    @property
    def shards(self) -> StoredShards:
        """The files of the global tier that this rank loads."""
        source = self._restore.source(self._chosen)
        assert isinstance(source, StoredShards)
        return source

    @property
    def stamp(self) -> ImageStamp | None:
        """Of the image that this rank would load; None if it would load from the global tier."""
        if self.choice is None:
            return None
        source = self._restore.source(self.choice)
        return source.stamp if isinstance(source, StoredImage) else None

    def metadata(self) -> Metadata:
        """Torch's metadata, as far as this rank needs it."""
        if self.image is None:
            return self.shards.describe()
        return self.image.metadata(self._others.values())

    def fitting(self, misfit: str) -> "NearestState":
        """The same if the load can use all images; else that of the global tier, with a warning.

        All ranks call it together; `misfit` is why the load cannot use the image of this rank.
        """
        misfits = self._group.gather(misfit, str)
        rank = next((rank for rank, reason in enumerate(misfits) if reason), None)
        if rank is None:
            return self
        step, tier = self._chosen.identity.step, self._chosen.offers[rank].tier
        rejected = RejectedState(step=step, tier=tier, rank=rank, reason=misfits[rank])
        self.close()
        published = NearestState(self._root, self._step, self._job, misfit=rejected)
        published._least_round = self._last_round
        if not self._group.rank:
            warn(
                f"all ranks load step {published._chosen.identity.step} from the global tier, and "
                f"not step {step} from memory: on rank {rank}, {misfits[rank]}"
            )
        return published

    def loaded(self) -> None:
        """Note and report that all is loaded; any rank may call it without the others."""
        identity = self._chosen.identity
        round_ = self._round if self._is_counted else self._last_round + 1
        note_restored(self._root, identity, round_)
        self._restore.report(self._chosen, self._reads)
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._image = None
        self._restore.close()

    @property
    def _chosen(self) -> RestoreChoice:
        assert self.choice is not None
        return self.choice

    @property
    def _last_round(self) -> int:
        return max(self._restore.last_round, self._least_round)

    def _choose(self, *, is_misfit: bool) -> RestoreChoice | None:
        began = monotonic()
        is_allowed = not is_misfit and environ.get(layout.FRESH_VARIABLE) == "1"
        try:
            choice = self._restore.choose(_check, allow_fresh_start=is_allowed)
        except BaseException:
            self.close()
            raise
        if choice is not None:
            source = self._restore.source(choice)
            size = source.size_bytes if isinstance(source, StoredImage) else source.verified_bytes
            read = ReadShare(size, monotonic() - began)
            self._reads = self._group.gather(read, ReadShare)
            self._see_others(source)
        return choice

    def _see_others(self, source: StateSource) -> None:
        """Learn what only other ranks have; ranks send it only if the hashes differ."""
        own = DcpImage(source).wholes if isinstance(source, StoredImage) else []
        hashes = self._group.gather(hash_of(msgspec.json.encode(own)), str)
        if len(set(hashes)) > 1:
            every = self._group.gather(own, list[WholeItem])
            self._others = {whole.key: whole for wholes in every for whole in wholes}


def _check(source: StateSource) -> None:
    """`UnfitError` if a rank cannot load this for torch."""
    if isinstance(source, StoredImage):
        DcpImage(source).metadata(())
    else:
        source.describe()
