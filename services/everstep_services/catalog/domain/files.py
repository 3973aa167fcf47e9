"""How the files change the index: they are the truth."""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from everstep.messages import KnownCheckpoint
from everstep.messages.facts.stamp import FactStamp
from everstep_services.catalog.domain.facts import decide, quarantined
from everstep_services.catalog.domain.index import Index
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark, StoredCheckpoint


def compare(
    index: Index,
    root: str,
    stored: Sequence[StoredCheckpoint],
    now: FactStamp,
    *,
    steps: Collection[int] | None = None,
    before: Index | None = None,
) -> tuple[int, int]:
    """Take over what the files show; return the number of new and of missing checkpoints.

    `steps`: only these were looked for. `before`: the index as it was before the files were read;
    what others have changed in it since is newer than the files, and stays.
    """
    index.roots.add(root)
    by_path = _by_path(index)
    newer = set() if before is None else _changed(_by_path(before), by_path)
    new = 0
    for checkpoint in stored:
        if checkpoint.path not in newer:
            new += checkpoint.path not in by_path
            _take_over(index, checkpoint, by_path.get(checkpoint.path), now)
    there = {checkpoint.path for checkpoint in stored} | newer
    for lost in _in(root, by_path):
        is_gone = lost.path not in there and (steps is None or lost.step in steps)
        if is_gone and lost.missing_since is None:
            index.put(replace(lost, missing_since=now.wall))
    missing = [
        checkpoint
        for checkpoint in _in(root, _by_path(index))
        if checkpoint.missing_since is not None
    ]
    return new, len(missing)


def doubts(
    index: Index, root: str, stored: Sequence[StoredCheckpoint], now: FactStamp
) -> Collection[int]:
    """The steps at which files and index differ.

    Listing files takes time. The index already has what was saved, deleted or unpinned meanwhile,
    so the caller looks at these steps once more.
    """
    tried = Index(index.job, index.document("", 0, ()))
    compare(tried, root, stored, now)
    return {
        step
        for tier, path, step in index.known.keys() | tried.known.keys()
        if index.known.get((tier, path, step)) != tried.known.get((tier, path, step))
    }


def moved(index: Index, root: str, names: Collection[str], now: FactStamp) -> Collection[int]:
    """CheckpointMark checkpoints without a folder as missing; return the steps to look at again.

    These include missing checkpoints that have a folder now.
    """
    steps = set()
    for checkpoint in _in(root, _by_path(index)):
        is_there = step_name(checkpoint.step) in names
        if is_there is (checkpoint.missing_since is None):
            continue
        steps.add(checkpoint.step)
        if not is_there:
            index.put(replace(checkpoint, missing_since=now.wall))
    return steps


def _by_path(index: Index) -> dict[str, KnownCheckpoint]:
    return {
        checkpoint.path: checkpoint
        for checkpoint in index.known.values()
        if checkpoint.tier == "global"
    }


def _in(root: str, by_path: Mapping[str, KnownCheckpoint]) -> list[KnownCheckpoint]:
    return [
        checkpoint for checkpoint in by_path.values() if checkpoint.path.rpartition("/")[0] == root
    ]


def _changed(
    before: Mapping[str, KnownCheckpoint], after: Mapping[str, KnownCheckpoint]
) -> set[str]:
    """The paths at which something changed that files show."""
    return {
        path
        for path in before.keys() | after.keys()
        if _of_files(before.get(path)) != _of_files(after.get(path))
    }


def _of_files(checkpoint: KnownCheckpoint | None) -> tuple[object, ...]:
    if checkpoint is None:
        return ()
    pin = (checkpoint.pinned_by, checkpoint.pin_reason)
    return (checkpoint.manifest_hash, pin, checkpoint.quarantined_for, checkpoint.missing_since)


def _take_over(
    index: Index, seen: StoredCheckpoint, before: KnownCheckpoint | None, now: FactStamp
) -> None:
    if seen.manifest is None:
        _take_broken(index, seen, before, now)
        return
    identity = seen.manifest.identity
    if before is None or before.manifest_hash != seen.manifest_hash:
        before = KnownCheckpoint(step=seen.step, committed_hash=_committed_hash(before))
    pinned, mark = seen.pinned, seen.quarantined
    index.put(
        replace(
            before,
            tier="global",
            path=seen.path,
            round=identity.round,
            saved_at=before.saved_at or seen.saved_at,
            size_bytes=seen.manifest.size_bytes,
            shards=len(seen.manifest.files),
            world_size=identity.world_size,
            manifest_hash=seen.manifest_hash,
            has_data_position=seen.manifest.has_data_position,
            pinned_by=(pinned.by or "somebody") if pinned else before.pinned_by,
            pin_reason=pinned.reason if pinned else before.pin_reason,
            missing_since=None,
        )
    )
    taken = index.of_step(seen.step, "global", seen.path)  # unless there are too many newer ones
    if mark and taken and not taken[0].quarantined_for:
        cause = mark.cause or _cause(mark)
        reason = mark.reason or "it has a mark next to its manifest"
        fact = quarantined(index.job, seen, cause, reason, mark.by or "catalog", now)
        decide(index, fact, now)


def _committed_hash(before: KnownCheckpoint | None) -> str:
    """The hash that a replaced checkpoint's manifest must have; empty if it may have any.

    A save may replace a checkpoint that is quarantined or gone; the fact of that save may be late.
    """
    if before is None or not before.may_be_restored:
        return ""
    return before.committed_hash


def _cause(mark: CheckpointMark) -> str:
    return "operator" if mark.failed_at is None else "nan_after_load"


def _take_broken(
    index: Index, seen: StoredCheckpoint, before: KnownCheckpoint | None, now: FactStamp
) -> None:
    if before is None:
        index.put(KnownCheckpoint(step=seen.step, path=seen.path))
    if before is None or not before.quarantined_for:
        decide(index, quarantined(index.job, seen, "corrupt", seen.flaw, "catalog", now), now)
