"""A checkpoint whose files are not what was saved is quarantined by the rank that has found it.

Whoever comes next passes it over without reading it, and a save of the same step has its place.
What could not be read for once, or does not fit this training, is left as it is.
"""

from datetime import UTC, datetime

from trainer_sdk.checkpoint.events import Teller
from trainer_sdk.checkpoint.manifest import Identity, step_of
from trainer_sdk.checkpoint.restore.choice import GLOBAL
from trainer_sdk.checkpoint.storage import Storage, StorageError
from trainer_sdk.checkpoint.storage.checkpoints import Mark, look, quarantine

_CAUSE = "corrupt"


def condemn(
    storage: Storage, name: str, identity: Identity | None, reason: str, rank: int, teller: Teller
) -> None:
    """Say so beside its manifest, and as a fact; `identity` is None if the manifest says none."""
    by = f"rank {rank}"
    at = datetime.now(UTC).isoformat(timespec="seconds")
    step = step_of(name)
    assert step is not None
    try:
        there = look(storage, step)
        if there is None or (there.manifest and there.manifest.identity) != identity:
            return  # another one has come meanwhile
        if not quarantine(storage, there, Mark(by=by, reason=reason, cause=_CAUSE, at=at)):
            return
    except StorageError as error:
        teller.warn(f"{name} cannot be quarantined: {error}")
        return
    teller.warn(f"{there.path} is quarantined, and is restored by nobody: {reason}")
    teller.tell(
        "quarantine",
        step=step,
        tier=GLOBAL,
        cause=_CAUSE,
        reason=reason,
        path=there.path,
        by=by,
    )
