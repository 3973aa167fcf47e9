"""The operations on one checkpoint: pin, quarantine, verify, delete."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from everstep.bus.requests import RefusalError
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointReleased,
    CheckpointUnpinned,
    CheckpointVerified,
    DeletionRefused,
    Done,
    Fact,
    KnownCheckpoint,
)
from everstep.messages.facts.stamp import FactStamp
from everstep.units import size
from everstep_services.catalog.domain.facts import decide, quarantined
from everstep_services.catalog.domain.index import Index, not_committed
from everstep_services.catalog.domain.retention import last_good, protection
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.scanner import Scanner
from everstep_services.catalog.storage_threads import OutOfReachError
from everstep_services.catalog.stores import CheckpointStores
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark

log = logging.getLogger(__name__)


class CheckpointOperations:
    """Each changes the index by compare-and-set, and the files where they can be reached.

    A deleted checkpoint leaves the index before its files go. So an operation that marks one makes
    sure, in the write itself, that the index still has it.
    """

    def __init__(self, indexer: Indexer, stores: CheckpointStores, scanner: Scanner) -> None:
        self._indexer = indexer
        self._stores = stores
        self._scanner = scanner
        self._read: list[tuple[str, str]] = []

    def is_read(self, job: str, checkpoint: KnownCheckpoint) -> bool:
        """Whether this replica is reading the checkpoint back."""
        return (job, checkpoint.path) in self._read

    async def pin(self, ask: ChangeCheckpoint) -> Done:
        """Keep a checkpoint, whatever the rules of retention say."""

        def pinned(before: KnownCheckpoint, now: FactStamp) -> Fact | None:
            if before.pinned_by:
                return None
            return CheckpointPinned(
                **now.head(ask.job), step=before.step, by=ask.by, reason=ask.reason
            )

        mark = CheckpointMark(by=ask.by, reason=ask.reason, at=self._at())
        before, note = await self._marked(ask, mark, pinned, is_pin=True)
        if before.pinned_by:
            state = f"is pinned already, by {before.pinned_by}: {before.pin_reason}"
            return Done(text=f"step {ask.step} {state}; for another reason, unpin it first{note}")
        return Done(text=f"step {ask.step} is kept until somebody unpins it{note}")

    async def unpin(self, ask: ChangeCheckpoint) -> Done:
        """Return a checkpoint to retention."""

        def unpinned(before: KnownCheckpoint, now: FactStamp) -> Fact | None:
            if not before.pinned_by:
                return None
            return CheckpointUnpinned(
                **now.head(ask.job), step=before.step, by=ask.by, reason=ask.reason
            )

        before, note = await self._marked(ask, None, unpinned, is_pin=True)
        if before.pinned_by:
            return Done(text=f"step {ask.step} is subject to retention again{note}")
        return Done(text=f"step {ask.step} was not pinned, as far as the catalog knows{note}")

    async def quarantine(self, ask: ChangeCheckpoint) -> Done:
        """Forbid to restore a checkpoint."""

        def forbidden(before: KnownCheckpoint, now: FactStamp) -> Fact | None:
            if before.quarantined_for:
                return None
            return quarantined(ask.job, before, "operator", ask.reason, ask.by, now)

        mark = CheckpointMark(by=ask.by, reason=ask.reason, cause="operator", at=self._at())
        before, note = await self._marked(ask, mark, forbidden, is_pin=False)
        if before.quarantined_for:
            state = f"is quarantined already ({before.quarantined_for}): {before.quarantine_reason}"
            again = f"for another reason, release it first{note}"
            return Done(text=f"step {ask.step} {state}; {again}")
        return Done(text=f"no rank restores step {ask.step} until it is released{note}")

    async def release(self, ask: ChangeCheckpoint) -> Done:
        """Allow to restore a checkpoint again."""
        before = known_in(await self._indexer.read(ask.job), ask)
        if not (before.quarantined_for or before.suspected_for):
            images = "for its states in the memory of nodes, say --tier memory"
            return Done(text=f"step {ask.step} is not quarantined; {images}", is_refused=True)

        def released(before: KnownCheckpoint, now: FactStamp) -> Fact:
            return CheckpointReleased(
                **now.head(ask.job),
                step=before.step,
                tier=before.tier,
                by=ask.by,
                reason=ask.reason,
            )

        _, note = await self._marked(ask, None, released, is_pin=False)
        return Done(text=f"step {ask.step} may be restored again{note}")

    async def _marked(
        self,
        ask: ChangeCheckpoint,
        mark: CheckpointMark | None,
        fact: Callable[[KnownCheckpoint, FactStamp], Fact | None],
        *,
        is_pin: bool,
    ) -> tuple[KnownCheckpoint, str]:
        """Mark the files of a checkpoint, and record its fact, if there is one.

        Returns the checkpoint as it was before, and a note if the files are out of reach.
        """
        checkpoint = known_in(await self._indexer.read(ask.job), ask)
        note = await self._mark_files(ask.job, checkpoint, mark, is_pin=is_pin)

        def action(index: Index, now: FactStamp) -> KnownCheckpoint:
            before = known_in(index, ask)
            made = fact(before, now)
            if made is not None:
                decide(index, made, now)
            return before

        return await self._indexer.change(ask.job, action), note

    async def verify(self, job: str, checkpoint: KnownCheckpoint) -> str | None:
        """Read a checkpoint back; return its flaw. It is quarantined if its bytes have changed.

        The result is None, and nothing is recorded, if it goes meanwhile or is replaced.
        """
        with self._read_mark(job, checkpoint):
            return await self._verify(job, checkpoint)

    async def _verify(self, job: str, checkpoint: KnownCheckpoint) -> str | None:
        root = root_of(checkpoint)
        verdict, took_s = await self._stores.verify(
            job, root, checkpoint.step, checkpoint.manifest_hash
        )
        if verdict is None:
            log.info("gone_while_read job=%s path=%s", job, checkpoint.path)
            await self._scanner.look_again(job, root, (checkpoint.step,))
            return None

        def action(index: Index, now: FactStamp) -> str | None:
            matches = index.of_step(checkpoint.step, checkpoint.tier, checkpoint.path)
            if not matches or matches[0].manifest_hash != checkpoint.manifest_hash:
                return None
            flaw = verdict.flaw or not_committed(matches[0])
            decide(
                index,
                CheckpointVerified(
                    **now.head(job),
                    step=checkpoint.step,
                    tier=checkpoint.tier,
                    is_good=not flaw,
                    path=checkpoint.path,
                    reason=flaw,
                    size_bytes=verdict.size_bytes,
                    took_s=round(took_s, 3),
                    manifest_hash=checkpoint.manifest_hash,
                ),
                now,
            )
            if not verdict.is_good and not matches[0].quarantined_for:
                bad = quarantined(job, matches[0], "corrupt", verdict.flaw, "catalog", now)
                decide(index, bad, now)
            return flaw

        flaw = await self._indexer.change(job, action)
        if flaw is None:
            return None
        if not verdict.is_good:
            log.warning(
                "checkpoint_corrupt job=%s path=%s reason=%r", job, checkpoint.path, verdict.flaw
            )
            mark = CheckpointMark(
                by="catalog",
                reason=verdict.flaw,
                cause="corrupt",
                at=self._at(),
                manifest_hash=checkpoint.manifest_hash,
            )
            await self._mark_files(job, checkpoint, mark, is_pin=False)
        elif flaw:
            log.warning("not_committed job=%s path=%s reason=%r", job, checkpoint.path, flaw)
        return flaw

    async def delete(self, job: str, checkpoint: KnownCheckpoint, reason: str, by: str) -> Done:
        """Remove a checkpoint, unless it must stay. The index drops it first."""
        root = root_of(checkpoint)
        why = await self._must_stay(job, checkpoint)
        if why is None:
            why = await self._indexer.change(job, lambda index, _: _drop(index, checkpoint))
        if why:
            await self._indexer.change(
                job, lambda index, now: decide(index, _refused(job, checkpoint, why, by, now), now)
            )
            return Done(text=f"step {checkpoint.step} stays: {why}", is_refused=True)
        try:
            freed = await self._stores.remove(job, root, checkpoint.step)
        except OutOfReachError:
            await self._indexer.change(job, lambda index, _: index.put(checkpoint))
            raise

        def action(index: Index, now: FactStamp) -> None:
            good = last_good(index.known.values(), root)
            decide(
                index,
                CheckpointDeleted(
                    **now.head(job),
                    step=checkpoint.step,
                    tier=checkpoint.tier,
                    reason=reason,
                    freed_bytes=freed,
                    path=checkpoint.path,
                    last_good_step=None if good is None else good.step,
                ),
                now,
            )

        await self._indexer.change(job, action)
        log.info("checkpoint_deleted job=%s path=%s reason=%r", job, checkpoint.path, reason)
        return Done(text=f"step {checkpoint.step} is deleted, which frees {size(freed)}")

    async def _must_stay(self, job: str, checkpoint: KnownCheckpoint) -> str | None:
        """Why the files forbid to delete it: they may be newer than the index."""
        root = root_of(checkpoint)
        seen = await self._stores.look(job, root, checkpoint.step)
        if seen is not None and seen.pinned:
            return f"{seen.pinned.by or 'somebody'} has pinned it: {seen.pinned.reason}"
        if seen is not None and seen.quarantined:
            return f"it is quarantined: {seen.quarantined.reason}"
        good = last_good((await self._indexer.read(job)).known.values(), root)
        if good is None:
            return None  # the index refuses it by itself
        kept = await self._stores.look(job, root, good.step)
        if kept is None or kept.manifest_hash != good.manifest_hash:
            return f"step {good.step}, the last good one, has changed: scan first"
        return None

    async def _mark_files(
        self, job: str, checkpoint: KnownCheckpoint, mark: CheckpointMark | None, *, is_pin: bool
    ) -> str:
        """Write or remove the mark next to the files; return a note if they are out of reach."""
        if checkpoint.tier != "global":
            return ""
        write = self._stores.pin if is_pin else self._stores.quarantine
        try:
            await write(job, root_of(checkpoint), checkpoint.step, mark)
        except OutOfReachError as error:
            return f"; its files are not marked: {error}"
        return ""

    @contextmanager
    def _read_mark(self, job: str, checkpoint: KnownCheckpoint) -> Generator[None]:
        self._read.append((job, checkpoint.path))
        try:
            yield
        finally:
            self._read.remove((job, checkpoint.path))

    def _at(self) -> str:
        return self._indexer.now().wall.isoformat()


def known_in(index: Index, ask: ChangeCheckpoint) -> KnownCheckpoint:
    """The checkpoint that a request names."""
    matches = index.of_step(ask.step, ask.tier)
    if not matches:
        raise RefusalError(
            "422",
            f"the catalog knows no checkpoint of step {ask.step} in the {ask.tier} tier of "
            f"{ask.job}; if its files are there, scan",
        )
    return matches[0]


def root_of(checkpoint: KnownCheckpoint) -> str:
    """The folder or URL that holds a checkpoint."""
    if checkpoint.tier != "global":
        raise OutOfReachError(f"step {checkpoint.step} of the {checkpoint.tier} tier has no files")
    return checkpoint.path.rpartition("/")[0]


def _drop(index: Index, checkpoint: KnownCheckpoint) -> str:
    """Drop a checkpoint from the index, or return why it must stay, in the write itself."""
    matches = index.of_step(checkpoint.step, checkpoint.tier, checkpoint.path)
    if not matches:
        return "it is gone already"
    why = protection(matches[0], index.known.values(), restored_step=index.restored_step)
    if not why:
        index.drop(matches[0])
    return why


def _refused(
    job: str, checkpoint: KnownCheckpoint, why: str, by: str, now: FactStamp
) -> DeletionRefused:
    return DeletionRefused(
        **now.head(job), step=checkpoint.step, tier=checkpoint.tier, reason=why, by=by
    )
