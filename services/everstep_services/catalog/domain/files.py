"""What comes of comparing the index with the files: they are the truth."""

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.messages import CheckpointQuarantined, KnownCheckpoint
from everstep_services.catalog.domain.index import Index, Moment
from everstep_services.catalog.domain.taking import say
from trainer_sdk.checkpoint.storage.shelf import Mark, Shelved


def compare(index: Index, root: str, found: Sequence[Shelved], now: Moment) -> tuple[int, int]:
    """Take over what is there, and mark what is not; how many are new, and how many missing."""
    index.roots.add(root)
    before = {one.path: one for one in index.known.values() if one.tier == "global"}
    new = sum(one.path not in before for one in found)
    for one in found:
        _take_over(index, one, before.get(one.path), now)
    seen = {one.path for one in found}
    gone = [
        one
        for one in before.values()
        if one.path.rpartition("/")[0] == root and one.path not in seen
    ]
    for lost in gone:
        if lost.missing_since is None:
            index.put(replace(lost, missing_since=now.wall))
    return new, len(gone)


def _take_over(index: Index, seen: Shelved, known: KnownCheckpoint | None, now: Moment) -> None:
    if seen.manifest is None:
        _take_broken(index, seen, known, now)
        return
    identity = seen.manifest.identity
    if known is None or known.manifest_hash != seen.manifest_hash:
        known = KnownCheckpoint(step=seen.step)
    pinned, quarantined = seen.pinned, seen.quarantined
    index.put(
        replace(
            known,
            tier="global",
            path=seen.path,
            round=identity.round,
            saved_at=known.saved_at or seen.saved_at,
            size_bytes=seen.manifest.size_bytes,
            shards=len(seen.manifest.files),
            world_size=identity.world_size,
            manifest_hash=seen.manifest_hash,
            has_data_position=seen.manifest.has_data_position,
            pinned_by=(pinned.by or "somebody") if pinned else known.pinned_by,
            pin_reason=pinned.reason if pinned else known.pin_reason,
            missing_since=None,
        )
    )
    if quarantined and not index.of_step(seen.step, "global", seen.path)[0].quarantined_for:
        _quarantine(
            index,
            seen,
            cause=quarantined.cause or _cause(quarantined),
            reason=quarantined.reason or "a file beside its manifest says so",
            by=quarantined.by or "catalog",
            now=now,
        )


def _cause(mark: Mark) -> str:
    return "operator" if mark.failed_at is None else "nan_after_load"


def _take_broken(index: Index, seen: Shelved, known: KnownCheckpoint | None, now: Moment) -> None:
    if known is None:
        index.put(KnownCheckpoint(step=seen.step, path=seen.path))
    if known is None or not known.quarantined_for:
        _quarantine(index, seen, cause="corrupt", reason=seen.flaw, by="catalog", now=now)


def _quarantine(
    index: Index, seen: Shelved, *, cause: str, reason: str, by: str, now: Moment
) -> None:
    say(
        index,
        CheckpointQuarantined(
            **now.about(index.job),
            step=seen.step,
            tier="global",
            cause=cause,
            reason=reason,
            path=seen.path,
            by=by,
        ),
        now,
    )
