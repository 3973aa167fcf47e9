"""Claims a root: it belongs to one job, stays on one device, and has a single saving launch."""

import errno
import fcntl
import os
import time
from dataclasses import dataclass

import msgspec

from everstep.evidence.files import check_regular, read_regular
from trainer_sdk.checkpoint.manifest import step_of
from trainer_sdk.checkpoint.storage.checkpoints import OWNER, RootOwner, owner_of
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import Storage

LAUNCH = ".launch"
"""A file that the writer of rank 0 locks, in launches that no agent counts."""
_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05


class OtherOwnerError(Exception):
    """The root belongs to another job."""


class OtherLaunchError(Exception):
    """Another launch of the job saves to the root now."""


class VanishedError(Exception):
    """The folder of earlier saves has vanished."""


class RootClaim:
    """The claim of one writer on a root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._place: RootPlace | None = None
        self._is_claimed = False
        self._lock = -1

    def claim(self, job: str, launch: str = "") -> None:
        """Claim the root for the job before each save; an error if it is another job's, or gone.

        `launch` names the process that saves, where no agent counts launches: no other may.
        """
        if self._is_claimed and not isinstance(self._storage, Folder):
            return
        check_there(self._storage, self._place, job)
        claim(self._storage, job)
        if launch and isinstance(self._storage, Folder):
            self._hold(os.path.join(self._storage.path, LAUNCH), launch)
        self._place, self._is_claimed = place_of(self._storage), True

    def _hold(self, path: str, launch: str) -> None:
        """Lock the file while this process lives; waits while a former launch is ending."""
        if self._lock >= 0 and _is_at(path, self._lock):
            return
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        deadline = time.monotonic() + _WITHIN_S
        while not self._try_to_hold(path, launch):
            if time.monotonic() > deadline:
                raise OtherLaunchError(
                    f"{os.path.dirname(path)} is being saved to by "
                    f"{_launch_at(path) or 'another launch'}: end one of the two, or give this one "
                    "a root of its own"
                )
            time.sleep(_LOOK_EVERY_S)

    def _try_to_hold(self, path: str, launch: str) -> bool:
        """Try to lock the file; whether this launch may save."""
        try:
            self._lock = _locked(path, launch)
        except BlockingIOError:
            return _launch_at(path) == launch  # another writer of the same launch has it
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        return True


_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES})
"""The file system has no locks, or another user owns the file and lets this user save there."""


def claim(storage: Storage, job: str) -> None:
    """Claim a place for the job; `OtherOwnerError` if it is another job's."""
    if storage.size(OWNER) is None and storage.put_if_absent(
        OWNER, msgspec.json.encode(RootOwner(job))
    ):
        return
    owner = owner_of(storage)
    if owner != job:
        raise OtherOwnerError(
            f"{storage.url} has the checkpoints of job {owner}, and this is {job}: give another "
            "place, or give this job that name"
        )


@dataclass(frozen=True, slots=True)
class RootPlace:
    """The device of a root, and its checkpoints."""

    device: int
    steps: frozenset[str]


def place_of(storage: Storage) -> RootPlace | None:
    """Where the folder is; None for an object store, or if it is gone."""
    if not isinstance(storage, Folder):
        return None
    try:
        device = os.stat(storage.path).st_dev
        names = os.listdir(storage.path) if os.path.isdir(storage.path) else []
    except FileNotFoundError:
        return None
    return RootPlace(device, frozenset(name for name in names if step_of(name) is not None))


def check_there(storage: Storage, before: RootPlace | None, job: str) -> None:
    """`VanishedError` if the folder is not that of the last save: a mount may be gone.

    A file system that is mounted again may have another number: its content tells that it is back.
    """
    there = place_of(storage)
    if before is None or (there is not None and there.device == before.device):
        return
    if there is None:
        raise VanishedError(
            f"{storage.url} was there at the last save, and is gone: mount it again, or make the "
            "folder with its owner and mode, and the next save goes on"
        )
    is_same = not before.steps or not there.steps.isdisjoint(before.steps)
    if not (is_same and owner_of(storage) == job):
        raise VanishedError(
            f"{storage.url} is on another device than at the last save, and lacks the checkpoints "
            "that were there, as after an unmount: mount it again, and the next save goes on"
        )


def _locked(path: str, launch: str) -> int:
    """The file, locked and with the name of the launch; `BlockingIOError` if another has it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        check_regular(held, path)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(held, 0)
        os.pwrite(held, launch.encode(), 0)
    except BaseException:
        os.close(held)
        raise
    return held


def _is_at(path: str, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.stat(path))
    except FileNotFoundError:
        return False


def _launch_at(path: str) -> str:
    try:
        return read_regular(path)[:256].decode(errors="replace")
    except OSError:
        return ""
