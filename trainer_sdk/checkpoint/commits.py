"""What this node remembers of committed checkpoints while its agent keeps the job.

A place where a checkpoint was committed and that is empty later is not mounted, or was deleted: a
training that began from scratch there would do so unnoticed.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from trainer_sdk import layout
from trainer_sdk.checkpoint.image_folder import read_document
from trainer_sdk.environment import environ


class _Commit(msgspec.Struct):
    root: str
    step: int


def note_commit(place: str, step: int) -> None:
    """Remember that a checkpoint is visible at this path or URL, below its root."""
    root = place.rpartition("/")[0]
    if (path := _note_of(root)) is None:
        return
    with suppress(OSError):  # it only guards against a later loss
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(_Commit(root, step)))


def committed_step(root: str) -> int | None:
    """The step that was committed last in this root, as this node knows; None if it knows none."""
    path = _note_of(root)
    commit = None if path is None else read_document(path, _Commit)
    return None if commit is None or commit.root != root else commit.step


def _note_of(root: str) -> Path | None:
    images = environ.get(layout.IMAGES_VARIABLE)
    name = hashlib.blake2b(root.encode(), digest_size=8).hexdigest()
    return Path(images, f"committed-{name}.json") if images else None
