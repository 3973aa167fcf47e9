"""What comes of comparing the index with the files: they are the truth."""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from everstep.messages import CheckpointQuarantined, KnownCheckpoint
from everstep_services.catalog.domain.index import Index, Moment
from everstep_services.catalog.domain.taking import say
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.storage.checkpoints import Mark, StoredCheckpoint


def compare(
    index: Index,
    root: str,
    found: Sequence[StoredCheckpoint],
    now: Moment,
    *,
    steps: Collection[int] | None = None,
    before: Index | None = None,
) -> tuple[int, int]:
    """Take over what is there, and mark what is not; how many are new, and how many missing.

    `steps`: only these were looked for. `before`: the index, read before the files were seen; what
    others have changed in it since is newer than what was seen, and stays.
    """
    index.roots.add(root)
    known = _by_path(index)
    newer = set() if before is None else _changed(_by_path(before), known)
    new = 0
    for one in found:
        if one.path not in newer:
            new += one.path not in known
            _take_over(index, one, known.get(one.path), now)
    there = {one.path for one in found} | newer
    for lost in _in(root, known):
        is_gone = lost.path not in there and (steps is None or lost.step in steps)
        if is_gone and lost.missing_since is None:
            index.put(replace(lost, missing_since=now.wall))
    missing = [one for one in _in(root, _by_path(index)) if one.missing_since is not None]
    return new, len(missing)


def doubts(
    index: Index, root: str, found: Sequence[StoredCheckpoint], now: Moment
) -> Collection[int]:
    """The steps of which the files say something else than the index does.

    Files take a while to be listed. What is saved, deleted or unpinned meanwhile is in the index
    already, so these are looked at once more.
    """
    tried = Index(index.job, index.document("", 0, ()))
    compare(tried, root, found, now)
    return {
        step
        for tier, path, step in index.known.keys() | tried.known.keys()
        if index.known.get((tier, path, step)) != tried.known.get((tier, path, step))
    }


def moved(index: Index, root: str, names: Collection[str], now: Moment) -> Collection[int]:
    """Mark what has no folder among these names as missing; the steps to be looked at again.

    Among those are missing ones that have a folder now.
    """
    steps = set()
    for one in _in(root, _by_path(index)):
        is_there = step_name(one.step) in names
        if is_there is (one.missing_since is None):
            continue
        steps.add(one.step)
        if not is_there:
            index.put(replace(one, missing_since=now.wall))
    return steps


def _by_path(index: Index) -> dict[str, KnownCheckpoint]:
    return {one.path: one for one in index.known.values() if one.tier == "global"}


def _in(root: str, known: Mapping[str, KnownCheckpoint]) -> list[KnownCheckpoint]:
    return [one for one in known.values() if one.path.rpartition("/")[0] == root]


def _changed(
    before: Mapping[str, KnownCheckpoint], known: Mapping[str, KnownCheckpoint]
) -> set[str]:
    """Where something else stands now, of all that files can say."""
    return {
        path
        for path in before.keys() | known.keys()
        if _of_files(before.get(path)) != _of_files(known.get(path))
    }


def _of_files(one: KnownCheckpoint | None) -> tuple[object, ...]:
    if one is None:
        return ()
    pin = (one.pinned_by, one.pin_reason)
    return (one.manifest_hash, pin, one.quarantined_for, one.missing_since)


def _take_over(
    index: Index, seen: StoredCheckpoint, known: KnownCheckpoint | None, now: Moment
) -> None:
    if seen.manifest is None:
        _take_broken(index, seen, known, now)
        return
    identity = seen.manifest.identity
    if known is None or known.manifest_hash != seen.manifest_hash:
        known = KnownCheckpoint(step=seen.step, committed_hash=_committed_hash(known))
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
    taken = index.of_step(seen.step, "global", seen.path)  # unless there are too many newer ones
    if quarantined and taken and not taken[0].quarantined_for:
        _quarantine(
            index,
            seen,
            cause=quarantined.cause or _cause(quarantined),
            reason=quarantined.reason or "a file beside its manifest says so",
            by=quarantined.by or "catalog",
            now=now,
        )


def _committed_hash(before: KnownCheckpoint | None) -> str:
    """What a manifest that takes the place of another must be; empty if it may be any.

    A save has the place of what is quarantined, or gone. Its own fact comes, or is lost.
    """
    if before is None or not before.may_be_restored:
        return ""
    return before.committed_hash


def _cause(mark: Mark) -> str:
    return "operator" if mark.failed_at is None else "nan_after_load"


def _take_broken(
    index: Index, seen: StoredCheckpoint, known: KnownCheckpoint | None, now: Moment
) -> None:
    if known is None:
        index.put(KnownCheckpoint(step=seen.step, path=seen.path))
    if known is None or not known.quarantined_for:
        _quarantine(index, seen, cause="corrupt", reason=seen.flaw, by="catalog", now=now)


def _quarantine(
    index: Index, seen: StoredCheckpoint, *, cause: str, reason: str, by: str, now: Moment
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
