"""What is done about one checkpoint: pinned, verified, quarantined, deleted."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from everstep.bus.asking import RefusalError
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReleased,
    CheckpointUnpinned,
    CheckpointVerified,
    DeletionRefused,
    Done,
    KnownCheckpoint,
)
from everstep.sizes import size
from everstep_services.catalog.domain.index import Index, Moment, not_committed
from everstep_services.catalog.domain.retention import last_good, protection
from everstep_services.catalog.domain.taking import say
from everstep_services.catalog.indexing import Indexer
from everstep_services.catalog.scanning import Scanner
from everstep_services.catalog.shelves import OutOfReachError, Shelves
from trainer_sdk.checkpoint.storage.checkpoints import Mark

log = logging.getLogger(__name__)


class Deeds:
    """Each changes the index by compare-and-set, and the files where they can be reached.

    What is deleted leaves the index before its files go, so whoever marks one makes sure, in the
    very write, that it is still known.
    """

    def __init__(self, indexer: Indexer, shelves: Shelves, scanner: Scanner) -> None:
        self._indexer = indexer
        self._shelves = shelves
        self._scanner = scanner
        self._read: list[tuple[str, str]] = []

    def is_read(self, job: str, one: KnownCheckpoint) -> bool:
        """It is being read back by this replica."""
        return (job, one.path) in self._read

    async def pin(self, ask: ChangeCheckpoint) -> Done:
        """Keep it, whatever retention says."""
        one = await self._known(ask)
        mark = Mark(by=ask.by, reason=ask.reason, at=self._at())
        beside = await self._beside(ask.job, one, mark, is_pin=True)

        def deed(index: Index, now: Moment) -> KnownCheckpoint:
            before = known_in(index, ask)
            if not before.pinned_by:
                about = now.about(ask.job)
                fact = CheckpointPinned(**about, step=one.step, by=ask.by, reason=ask.reason)
                say(index, fact, now)
            return before

        before = await self._indexer.change(ask.job, deed)
        if before.pinned_by:
            said = f"is pinned already, by {before.pinned_by}: {before.pin_reason}"
            return Done(text=f"step {one.step} {said}; for another reason, unpin it first{beside}")
        return Done(text=f"step {one.step} is kept until somebody unpins it{beside}")

    async def unpin(self, ask: ChangeCheckpoint) -> Done:
        """Let retention have it again."""
        one = await self._known(ask)
        beside = await self._beside(ask.job, one, None, is_pin=True)

        def deed(index: Index, now: Moment) -> bool:
            was_pinned = bool(known_in(index, ask).pinned_by)
            if was_pinned:
                about = now.about(ask.job)
                fact = CheckpointUnpinned(**about, step=one.step, by=ask.by, reason=ask.reason)
                say(index, fact, now)
            return was_pinned

        if await self._indexer.change(ask.job, deed):
            return Done(text=f"retention may have step {one.step} again{beside}")
        return Done(text=f"step {one.step} was not pinned, as far as is known{beside}")

    async def quarantine(self, ask: ChangeCheckpoint) -> Done:
        """Have nobody restore it."""
        one = await self._known(ask)
        mark = Mark(by=ask.by, reason=ask.reason, cause="operator", at=self._at())
        beside = await self._beside(ask.job, one, mark, is_pin=False)

        def deed(index: Index, now: Moment) -> KnownCheckpoint:
            before = known_in(index, ask)
            if not before.quarantined_for:
                say(index, quarantined(index.job, one, "operator", ask.reason, ask.by, now), now)
            return before

        before = await self._indexer.change(ask.job, deed)
        if before.quarantined_for:
            said = f"is quarantined already ({before.quarantined_for}): {before.quarantine_reason}"
            again = f"for another reason, release it first{beside}"
            return Done(text=f"step {one.step} {said}; {again}")
        return Done(text=f"step {one.step} is restored by nobody until it is released{beside}")

    async def release(self, ask: ChangeCheckpoint) -> Done:
        """Let it be restored again."""
        one = await self._known(ask)
        if not one.quarantined_for:
            images = "for its states in the memory of nodes, say --tier memory"
            return Done(text=f"step {one.step} is not quarantined; {images}", is_refused=True)
        beside = await self._beside(ask.job, one, None, is_pin=False)

        def deed(index: Index, now: Moment) -> None:
            known_in(index, ask)
            about = now.about(ask.job)
            say(
                index,
                CheckpointReleased(
                    **about, step=one.step, tier=one.tier, by=ask.by, reason=ask.reason
                ),
                now,
            )

        await self._indexer.change(ask.job, deed)
        return Done(text=f"step {one.step} may be restored again{beside}")

    async def verify(self, job: str, one: KnownCheckpoint) -> str | None:
        """Read it back; what is wrong with it. Quarantined if its bytes are not what was saved.

        None, and nothing is said of it, if it goes meanwhile or another takes its place.
        """
        with self._reading(job, one):
            return await self._verify(job, one)

    async def _verify(self, job: str, one: KnownCheckpoint) -> str | None:
        root = root_of(one)
        verdict, took_s = await self._shelves.verify(job, root, one.step, one.manifest_hash)
        if verdict is None:
            log.info("gone_while_read job=%s path=%s", job, one.path)
            await self._scanner.look_again(job, root, (one.step,))
            return None

        def deed(index: Index, now: Moment) -> str | None:
            known = index.of_step(one.step, one.tier, one.path)
            if not known or known[0].manifest_hash != one.manifest_hash:
                return None
            flaw = verdict.flaw or not_committed(known[0])
            say(
                index,
                CheckpointVerified(
                    **now.about(job),
                    step=one.step,
                    tier=one.tier,
                    is_good=not flaw,
                    path=one.path,
                    reason=flaw,
                    size_bytes=verdict.size_bytes,
                    took_s=round(took_s, 3),
                    manifest_hash=one.manifest_hash,
                ),
                now,
            )
            if not verdict.is_good and not known[0].quarantined_for:
                say(index, quarantined(job, one, "corrupt", verdict.flaw, "catalog", now), now)
            return flaw

        flaw = await self._indexer.change(job, deed)
        if flaw is None:
            return None
        if not verdict.is_good:
            log.warning("checkpoint_corrupt job=%s path=%s reason=%r", job, one.path, verdict.flaw)
            mark = Mark(
                by="catalog",
                reason=verdict.flaw,
                cause="corrupt",
                at=self._at(),
                manifest_hash=one.manifest_hash,
            )
            await self._beside(job, one, mark, is_pin=False)
        elif flaw:
            log.warning("not_committed job=%s path=%s reason=%r", job, one.path, flaw)
        return flaw

    async def delete(self, job: str, one: KnownCheckpoint, reason: str, by: str) -> Done:
        """Remove it, unless it must stay; the index forgets it first: nobody is sent to it."""
        root = root_of(one)
        why = await self._must_stay(job, one)
        if why is None:
            why = await self._indexer.change(job, lambda index, _: _forgotten(index, one))
        if why:
            await self._indexer.change(
                job, lambda index, now: say(index, _refused(job, one, why, by, now), now)
            )
            return Done(text=f"step {one.step} stays: {why}", is_refused=True)
        try:
            freed = await self._shelves.remove(job, root, one.step)
        except OutOfReachError:
            await self._indexer.change(job, lambda index, _: index.put(one))
            raise

        def deed(index: Index, now: Moment) -> None:
            good = last_good(index.known.values(), root)
            say(
                index,
                CheckpointDeleted(
                    **now.about(job),
                    step=one.step,
                    tier=one.tier,
                    reason=reason,
                    freed_bytes=freed,
                    path=one.path,
                    last_good_step=None if good is None else good.step,
                ),
                now,
            )

        await self._indexer.change(job, deed)
        log.info("checkpoint_deleted job=%s path=%s reason=%r", job, one.path, reason)
        return Done(text=f"step {one.step} is deleted, which frees {size(freed)}")

    async def _must_stay(self, job: str, one: KnownCheckpoint) -> str | None:
        """What the files say against it: they are the truth, and may be newer than the index."""
        root = root_of(one)
        seen = await self._shelves.look(job, root, one.step)
        if seen is not None and seen.pinned:
            return f"{seen.pinned.by or 'somebody'} has pinned it: {seen.pinned.reason}"
        if seen is not None and seen.quarantined:
            return f"it is quarantined: {seen.quarantined.reason}"
        good = last_good((await self._indexer.read(job)).known.values(), root)
        if good is None:
            return None  # the index says so itself
        kept = await self._shelves.look(job, root, good.step)
        if kept is None or kept.manifest_hash != good.manifest_hash:
            return f"step {good.step}, the last good one, is not what it was: scan first"
        return None

    async def _beside(
        self, job: str, one: KnownCheckpoint, mark: Mark | None, *, is_pin: bool
    ) -> str:
        """Say it beside the files, too; what to add where they are out of reach."""
        if one.tier != "global":
            return ""
        say = self._shelves.pin if is_pin else self._shelves.quarantine
        try:
            await say(job, root_of(one), one.step, mark)
        except OutOfReachError as error:
            return f"; its files do not say so: {error}"
        return ""

    @contextmanager
    def _reading(self, job: str, one: KnownCheckpoint) -> Generator[None]:
        self._read.append((job, one.path))
        try:
            yield
        finally:
            self._read.remove((job, one.path))

    async def _known(self, ask: ChangeCheckpoint) -> KnownCheckpoint:
        return known_in(await self._indexer.read(ask.job), ask)

    def _at(self) -> str:
        return self._indexer.moment().wall.isoformat()


def known_in(index: Index, ask: ChangeCheckpoint) -> KnownCheckpoint:
    """The checkpoint that is meant."""
    found = index.of_step(ask.step, ask.tier)
    if not found:
        raise RefusalError(
            "422",
            f"the catalog knows no checkpoint of step {ask.step} in the {ask.tier} tier of "
            f"{ask.job}; if its files are there, scan",
        )
    return found[0]


def root_of(one: KnownCheckpoint) -> str:
    """The folder or URL that it is in."""
    if one.tier != "global":
        raise OutOfReachError(f"step {one.step} of the {one.tier} tier is in no file")
    return one.path.rpartition("/")[0]


def quarantined(
    job: str, one: KnownCheckpoint, cause: str, reason: str, by: str, now: Moment
) -> CheckpointQuarantined:
    """The fact."""
    about: dict[str, Any] = now.about(job)
    return CheckpointQuarantined(
        **about, step=one.step, tier=one.tier, cause=cause, reason=reason, path=one.path, by=by
    )


def _forgotten(index: Index, one: KnownCheckpoint) -> str:
    """Why it must stay, as of the very revision that is written; else it is dropped."""
    found = index.of_step(one.step, one.tier, one.path)
    if not found:
        return "it is gone already"
    why = protection(found[0], index.known.values(), restored_step=index.restored_step)
    if not why:
        index.drop(found[0])
    return why


def _refused(job: str, one: KnownCheckpoint, why: str, by: str, now: Moment) -> DeletionRefused:
    return DeletionRefused(**now.about(job), step=one.step, tier=one.tier, reason=why, by=by)
