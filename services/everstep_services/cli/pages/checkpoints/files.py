"""Checkpoints in a folder or URL: needs no service, the files say everything."""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from everstep.messages import KnownCheckpoint
from everstep.units import size
from everstep_services.catalog.domain.retention import RetentionRules, judged
from everstep_services.cli.cells import aligned, cell, counted, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import asker
from everstep_services.cli.output import echo, print_record, print_records, say
from everstep_services.cli.pages.checkpoints.catalog import print_judged, print_list
from trainer_sdk.checkpoint.manifest import step_name, step_of
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for
from trainer_sdk.checkpoint.storage.adoption import adopt
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    CheckpointMark,
    GoneError,
    StoredCheckpoint,
    Verification,
    flaw_of_sizes,
    look,
    mark,
    owner_of,
    pull,
    quarantine,
    stored_checkpoints,
    unmark,
    verify,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.leftovers import Leftover, leftovers, sweep
from trainer_sdk.checkpoint.storage.port import MissingError

VERIFY_COLUMNS = ("step", "state", "size", "took", "place", "reason")


def print_shelf(invocation: Invocation, place: str, most: int) -> None:
    """Every checkpoint in a place."""
    with _told():
        checkpoints = [*_all(place), *_files_in_place(storage_for(place))]
    checkpoints.sort(key=lambda checkpoint: -checkpoint.step)
    print_list(invocation, [_record(checkpoint) for checkpoint in checkpoints[:most]])


def _files_in_place(storage: Storage) -> Iterator[StoredCheckpoint]:
    """Files that have the names of steps: no save of these steps can become visible."""
    if not isinstance(storage, Folder):
        return
    for name in os.listdir(storage.path):
        step, path = step_of(name), os.path.join(storage.path, name)
        if step is not None and not os.path.isdir(path):
            yield StoredCheckpoint(
                step, path, None, flaw="it is a file, not a folder: move it away"
            )


def print_shelved(invocation: Invocation, place: str, step: int) -> int:
    """One checkpoint, and its files; 1 when it is visibly not whole."""
    with _told():
        storage = storage_for(place)
        checkpoint = _one(storage, step)
        checkpoint = replace(checkpoint, flaw=flaw_of_sizes(storage, checkpoint))
    record = _record(checkpoint)
    files = () if checkpoint.manifest is None else checkpoint.manifest.files
    code = Exit.ERROR if checkpoint.flaw else Exit.OK
    if invocation.output is not None:
        shards = [msgspec.structs.asdict(file) for file in files]
        print_record(invocation, "checkpoint", {**record, "files": shards}, "step")
        return code
    echo(f"step {step}: {cell(record['note']) or 'committed'}")
    lines = [
        ("place", checkpoint.path),
        ("job", "-" if checkpoint.manifest is None else checkpoint.manifest.identity.job),
        ("saved", moment(record["saved_at"])),
        ("round", record["round"]),
        ("ranks", record["world_size"]),
        ("size", size(record["size_bytes"])),
        ("manifest", checkpoint.manifest_hash),
    ]
    for line in aligned(lines):
        echo(line)
    for line in aligned([(file.name, size(file.size_bytes), file.hash) for file in files]):
        echo(line)
    return code


def verify_shelf(invocation: Invocation, place: str, step: int | None) -> int:
    """Read back all checkpoints of a place, or one; 1 when one is not what was saved."""
    if step is None:
        place, step = _of_folder(place)
    with _told():
        storage = storage_for(place)
        if step is None:
            rows = list(_all_verified(storage, _all(place)))
        else:
            rows = [_verified(storage, _one(storage, step))]
    is_for_people = invocation.output in {None, "table"}
    people = [
        {**row, "size": size(row["size_bytes"]), "took": span(row["took_s"]), "place": place}
        for row in rows
    ]
    print_records(
        invocation, "verified_checkpoint", people if is_for_people else rows, VERIFY_COLUMNS
    )
    return Exit.OK if all(row["is_good"] for row in rows) else Exit.ERROR


def mark_shelved(invocation: Invocation, place: str, step: int, action: str, reason: str) -> None:
    """Pin or unpin, quarantine or release, by a file next to the manifest."""
    name = PINNED if action in {"pin", "unpin"} else QUARANTINED
    marker = f"{step_name(step)}/{name}"
    with _told():
        storage = storage_for(place)
        checkpoint = _one(storage, step)
        before = checkpoint.pinned if name == PINNED else checkpoint.quarantined
        if action in {"pin", "quarantine"} and before is not None:
            undo = "unpin" if action == "pin" else "release"
            text = f"{marker} records that already: {before.reason}; "
            text += f"for another reason, {undo} it first"
        elif action == "quarantine":
            quarantine(storage, checkpoint, _mark(reason, "operator"))
            text = f"{marker} records that now"
        elif action == "pin":
            mark(storage, step, name, _mark(reason))
            text = f"{marker} records that now"
        else:
            unmark(storage, step, name)
            text = f"{marker} {'was not there' if before is None else 'is gone'}"
    record = {"place": checkpoint.path, "step": step, "action": action, "text": text}
    if invocation.output is None:
        echo(f"{checkpoint.path}: {text}")
    else:
        print_record(invocation, "marked_checkpoint", record, "step")


def collect_shelf(
    invocation: Invocation, place: str, keep: tuple[int, int], *, wants_it: bool
) -> None:
    """Say what retention does not keep, and delete it if that is wanted."""
    with _told():
        storage = storage_for(place)
        checkpoints = _with_a_good_one(storage, _all(place))
        decisions = judged(checkpoints, RetentionRules(*keep))
        left = leftovers(storage)
        rows = [msgspec.structs.asdict(item.shown) for item in decisions]
        print_judged(invocation, rows + [_left_record(storage, item) for item in left])
        doomed = [item.checkpoint for item in decisions if not item.is_kept]
        freed = sum(item.size_bytes for item in doomed) + sum(item.size_bytes for item in left)
        if wants_it:
            freed = sum(storage.remove(step_name(item.step)) for item in reversed(doomed))
            freed += sum(sweep(storage, item) or 0 for item in left)
    remedy = ": say --delete" if doomed or left else ""
    end = "" if wants_it else f"; nothing was deleted{remedy}"
    verb = "are gone, which freed" if wants_it else "go, which would free"
    swept = f" and what {counted(len(left), 'save')} left unfinished" if left else ""
    say(f"{len(doomed)} of {len(decisions)} checkpoints{swept} {verb} {size(freed)}{end}")


def pull_to(invocation: Invocation, place: str, step: int, to: Path) -> None:
    """Copy one into a folder of this machine."""
    began = time.monotonic()
    with _told():
        storage = storage_for(place)
        path, verdict = pull(storage, _one(storage, step), str(to))
    if not verdict.is_good:
        raise CliError(f"nothing was pulled into {to}: {verdict.flaw}")
    took_s = time.monotonic() - began
    record = {"path": path, "step": step, "size_bytes": verdict.size_bytes, "took_s": took_s}
    if invocation.output is None:
        echo(f"{path}: {size(verdict.size_bytes)} in {span(took_s)}, every byte compared")
    else:
        print_record(invocation, "pulled_checkpoint", record, "path")


def export_to(invocation: Invocation, place: str, step: int, to: str, form: dict[str, Any]) -> None:
    """Write the tensors of one as safetensors."""
    try:
        from trainer_sdk.checkpoint.export import ExportForm, export
    except ModuleNotFoundError as error:
        raise CliError(
            f"{error.name} is not installed here: pip install 'everstep[export]', with torch"
        ) from error
    with _told():
        storage = storage_for(place)
        made = export(storage, _one(storage, step), to, ExportForm(**form))
    if made.left_out:
        say(f"{counted(len(made.left_out), 'value')} left out, as no tensors: {made.left_out[0]} …")
    if invocation.output is None:
        tensors, files = counted(made.tensors, "tensor"), counted(len(made.files), "file")
        echo(f"{made.path}: {tensors} in {files}, {size(made.size_bytes)}, every byte compared")
    else:
        print_record(invocation, "exported_checkpoint", msgspec.to_builtins(made), "path")


def adopt_into(invocation: Invocation, source: str, root: str, step: int, job: str) -> None:
    """Take over a plain checkpoint of torch's."""
    with _told():
        path, size_bytes = adopt(source, root, step, job)
    record = {"path": path, "step": step, "job": job, "size_bytes": size_bytes}
    if invocation.output is None:
        echo(f"{path}: {size(size_bytes)}, of job {job}")
    else:
        print_record(invocation, "adopted_checkpoint", record, "path")


def _mark(reason: str, cause: str = "") -> CheckpointMark:
    return CheckpointMark(by=asker(), reason=reason, cause=cause, at=datetime.now(UTC).isoformat())


def _all(place: str) -> Sequence[StoredCheckpoint]:
    storage = storage_for(place)
    checkpoints = stored_checkpoints(storage)
    if not checkpoints and owner_of(storage) is None:
        raise CliError(
            f"{place} has no checkpoints: there is neither owner.json nor a step-… folder",
            Exit.NOT_FOUND,
        )
    return checkpoints


def _one(storage: Storage, step: int) -> StoredCheckpoint:
    checkpoint = look(storage, step)
    if checkpoint is None:
        raise CliError(f"{storage.url} has no checkpoint of step {step}", Exit.NOT_FOUND)
    return checkpoint


def _of_folder(place: str) -> tuple[str, int | None]:
    """The root and the step, if it is the folder of one checkpoint."""
    root, _, name = place.rstrip("/").rpartition("/")
    step = step_of(name)
    return (place, None) if step is None else (root or ".", step)


def _all_verified(
    storage: Storage, checkpoints: Sequence[StoredCheckpoint]
) -> Generator[dict[str, Any]]:
    """But for those that retention has removed meanwhile."""
    for checkpoint in checkpoints:
        try:
            yield _verified(storage, checkpoint)
        except GoneError as error:
            say(str(error))


def _verified(storage: Storage, checkpoint: StoredCheckpoint) -> dict[str, Any]:
    began = time.monotonic()
    verdict: Verification = verify(storage, checkpoint)
    return {
        "step": checkpoint.step,
        "state": "NOT GOOD" if verdict.flaw else "DOUBTFUL" if verdict.doubt else "good",
        "is_good": verdict.is_good,
        "size_bytes": 0 if checkpoint.manifest is None else checkpoint.manifest.size_bytes,
        "took_s": round(time.monotonic() - began, 3),
        "path": checkpoint.path,
        "reason": verdict.flaw or verdict.doubt,
    }


def _with_a_good_one(
    storage: Storage, checkpoints: Sequence[StoredCheckpoint]
) -> list[KnownCheckpoint]:
    """All of them as the catalog knows them, the newest that is good read back."""
    catalog = {checkpoint.step: _known(checkpoint) for checkpoint in checkpoints}
    for checkpoint in checkpoints:
        if checkpoint.quarantined or checkpoint.manifest is None:
            continue
        say(f"reading back {checkpoint.path}")
        try:
            flaw = verify(storage, checkpoint).flaw
        except GoneError as error:
            say(str(error))
            del catalog[checkpoint.step]
            continue
        catalog[checkpoint.step] = msgspec.structs.replace(
            catalog[checkpoint.step],
            verified_at=datetime.now(UTC),
            flaw=flaw,
            quarantined_for="corrupt" if flaw else "",
            quarantine_reason=flaw,
        )
        if not flaw:
            break
        say(flaw)
    return list(catalog.values())


def _known(checkpoint: StoredCheckpoint) -> KnownCheckpoint:
    pinned, quarantined = checkpoint.pinned, checkpoint.quarantined
    return KnownCheckpoint(
        step=checkpoint.step,
        path=checkpoint.path,
        saved_at=checkpoint.saved_at,
        size_bytes=0 if checkpoint.manifest is None else checkpoint.manifest.size_bytes,
        pinned_by=(pinned.by or "somebody") if pinned else "",
        pin_reason=pinned.reason if pinned else "",
        quarantined_for=(quarantined.cause or "operator") if quarantined else checkpoint.flaw,
        quarantine_reason=quarantined.reason if quarantined else checkpoint.flaw,
    )


def _record(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """As REST shows it, as far as the files say it."""
    manifest = checkpoint.manifest
    notes = [checkpoint.flaw]
    if checkpoint.quarantined:
        notes.append(
            f"quarantined: {checkpoint.quarantined.reason or checkpoint.quarantined.cause}"
        )
    if checkpoint.pinned:
        notes.append(f"pinned by {checkpoint.pinned.by or 'somebody'}: {checkpoint.pinned.reason}")
    return {
        "step": checkpoint.step,
        "tier": "global",
        "path": checkpoint.path,
        "saved_at": None if checkpoint.saved_at is None else checkpoint.saved_at.isoformat(),
        "round": None if manifest is None else manifest.identity.round,
        "size_bytes": 0 if manifest is None else manifest.size_bytes,
        "shards": 0 if manifest is None else len(manifest.files),
        "world_size": None if manifest is None else manifest.identity.world_size,
        "survivable_losses": None,
        "is_verified": False,
        "is_pinned": checkpoint.pinned is not None,
        "is_quarantined": checkpoint.quarantined is not None or bool(checkpoint.flaw),
        "is_suspect": False,
        "is_missing": False,
        "has_data_position": manifest is not None and manifest.has_data_position,
        "manifest_hash": checkpoint.manifest_hash,
        "note": "; ".join(text for text in notes if text) or None,
    }


def _left_record(storage: Storage, leftover: Leftover) -> dict[str, Any]:
    return {
        "step": leftover.step,
        "is_kept": False,
        "reason": leftover.reason,
        "path": f"{storage.url}/{leftover.folder}",
        "size_bytes": leftover.size_bytes,
    }


@contextmanager
def _told() -> Generator[None]:
    """An error of the storage, in one line."""
    try:
        yield
    except MissingError as error:
        raise CliError(str(error), Exit.NOT_FOUND) from error
    except StorageError as error:
        raise CliError(str(error)) from error
