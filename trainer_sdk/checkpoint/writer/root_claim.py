"""Whose a root is: one job's, on the device of the last save, and one launch's at a time."""

import errno
import fcntl
import os
import time

import msgspec

from trainer_sdk.checkpoint.storage.checkpoints import OWNER, owner_of
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import Storage

LAUNCH = ".launch"
"""In a folder, and locked by the writer of rank 0 of a launch that no agent counts."""
_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.05


class OtherOwnerError(Exception):
    """The place belongs to another job."""


class OtherLaunchError(Exception):
    """Another launch of the job saves there now."""


class VanishedError(Exception):
    """The folder that earlier saves went to is gone."""


class Owner(msgspec.Struct, frozen=True):
    """Whose checkpoints are in a place."""

    job: str


class RootClaim:
    """A root as one writer has claimed it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._device: int | None = None
        self._is_claimed = False
        self._lock = -1

    def claim(self, job: str, launch: str = "") -> None:
        """Make it the job's before each save, unless it belongs to another, or has gone.

        `launch` names the process that saves where no agent counts launches: it alone may.
        """
        if self._is_claimed and not isinstance(self._storage, Folder):
            return
        check_there(self._storage, self._device)
        claim(self._storage, job)
        if launch and isinstance(self._storage, Folder):
            self._hold(os.path.join(self._storage.path, LAUNCH), launch)
        self._device, self._is_claimed = device_of(self._storage), True

    def _hold(self, path: str, launch: str) -> None:
        """Lock it as long as this process lives; the last launch may be on its way out."""
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
        """Whether this launch may save there."""
        try:
            self._lock = _locked(path, launch)
        except BlockingIOError:
            return _launch_at(path) == launch  # another writer of the same process has it
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        return True


_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES})
"""A file system has none, or the file is another user's, who has let this one save there."""


def claim(storage: Storage, job: str) -> None:
    """Make this place the job's, unless it belongs to another."""
    if storage.size(OWNER) is None and storage.put_if_absent(
        OWNER, msgspec.json.encode(Owner(job))
    ):
        return
    owner = owner_of(storage)
    if owner != job:
        raise OtherOwnerError(
            f"{storage.url} has the checkpoints of job {owner}, and this is {job}: give another "
            "place, or this job the other's name"
        )


def device_of(storage: Storage) -> int | None:
    """The device that has the folder; None where there is none."""
    try:
        return os.stat(storage.path).st_dev if isinstance(storage, Folder) else None
    except FileNotFoundError:
        return None


def check_there(storage: Storage, before: int | None) -> None:
    """The folder is where it was at the last save: none is made where a mount was."""
    there = device_of(storage)
    if before is None or there == before:
        return
    what = "is gone" if there is None else "is on another device, as where a mount has gone"
    raise VanishedError(
        f"{storage.url} was there at the last save, and {what}: mount it again, or make the folder "
        "with its owner and mode, and the next save goes on"
    )


def _locked(path: str, launch: str) -> int:
    """The file, locked and with the name of the launch; `BlockingIOError` if another has it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
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
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(256)
    except OSError:
        return ""
