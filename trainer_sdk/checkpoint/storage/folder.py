"""Checkpoints in a folder of a file system: written under temporary names, synced, and renamed."""

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from everstep.evidence.files import open_regular
from trainer_sdk.checkpoint.storage.port import (
    IrregularFileError,
    MissingError,
    Octets,
    StorageError,
    StoredFile,
    checked,
    small,
)

_REMOVING = ".removing"
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_MODE = 0o666  # the user's umask applies, as to every file of a training


class Folder:
    """A folder, which is created at the first write."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    @property
    def url(self) -> str:
        """Its absolute path."""
        return self.path

    def put(self, name: str, parts: Iterable[Octets]) -> int:
        """Write a file, or replace it; returns its size."""
        path = self._at(name)
        with _clear_errors(path, "written"), _temporary_name(path) as temporary:
            size = _write(temporary, parts)
            os.replace(temporary, path)
            sync_folder(os.path.dirname(path))
            return size

    def put_beside(self, name: str, data: bytes) -> None:
        """Write a file in a folder that exists."""
        path = self._at(name)
        with _clear_errors(path, "written"), _temporary_name(path, makes_folder=False) as temporary:
            _write(temporary, (data,))
            os.replace(temporary, path)
            sync_folder(os.path.dirname(path))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one: of several writers, one wins."""
        path = self._at(name)
        with _clear_errors(path, "written"), _temporary_name(path) as temporary:
            _write(temporary, (data,))
            try:
                os.link(temporary, path)
            except FileExistsError:
                return self.read(name) == data
            sync_folder(os.path.dirname(path))
            return True

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes, or all."""
        path = self._at(name)
        with _clear_errors(path, "read"), open_regular(path) as file:
            file.seek(start)
            if length is None:
                length = small(path, os.fstat(file.fileno()).st_size) - start
            buffer = bytearray(max(length, 0))
            view = memoryview(buffer)
            while view:
                count = file.readinto(view)
                if not count:
                    raise StorageError(
                        f"{path} ends at {len(buffer) - len(view) + start} bytes, and "
                        f"{start + len(buffer)} were wanted: it is cut short"
                    )
                view = view[count:]
            return bytes(buffer)

    def size(self, name: str) -> int | None:
        """The size of a file; None if it does not exist."""
        with _clear_errors(self._at(name), "read"):
            try:
                return os.stat(self._at(name)).st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def folders(self, inside: str = "") -> Sequence[str]:
        """The names of its folders, or of those in `inside`, sorted; none begins with a dot."""
        path = self._at(inside) if inside else self.path
        with _clear_errors(path, "listed"):
            try:
                entries = list(os.scandir(path))
            except FileNotFoundError:
                return []
            return sorted(e.name for e in entries if e.name[0] != "." and _may_be_folder(e))

    def files(self, folder: str) -> Sequence[StoredFile]:
        """All files below a folder, sorted by name."""
        top = self._at(folder)
        files: list[StoredFile] = []
        with _clear_errors(top, "listed"):
            for where, _, names in os.walk(top):
                for name in names:
                    path = os.path.join(where, name)
                    with suppress(FileNotFoundError):  # it was removed meanwhile
                        about = _about(path)
                        files.append(
                            StoredFile(
                                os.path.relpath(path, self.path), about.st_size, _changed(about)
                            )
                        )
        return sorted(files, key=lambda file: file.name)

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""
        with _clear_errors(self._at(name), "removed"), suppress(FileNotFoundError):
            os.unlink(self._at(name))

    def remove(self, folder: str) -> int:
        """Remove a folder; one rename hides it at once."""
        path = self._at(folder)
        freed = sum(file.size_bytes for file in self.files(folder))
        hidden = os.path.join(self.path, _REMOVING, f"{os.path.basename(path)}-{uuid.uuid4().hex}")
        with _clear_errors(path, "removed"):
            while os.path.lexists(path):  # another process may just have removed the target folder
                with suppress(FileNotFoundError, FileExistsError):
                    os.makedirs(os.path.dirname(hidden), exist_ok=True)
                    os.rename(path, hidden)
                    sync_folder(self.path)
            shutil.rmtree(os.path.dirname(hidden), ignore_errors=True)
        return freed

    def now(self) -> datetime:
        """The time by the clock of the file system, which may be a server's."""
        path = self._at("clock")
        with _clear_errors(path, "written"), _temporary_name(path) as temporary:
            _write(temporary, (b"",))
            return _changed(os.stat(temporary))

    def publish(self, hidden: str, name: str) -> bool:
        """Rename a hidden folder to its visible name, durably; False if the name is taken.

        Its files must be synced already.
        """
        path = self._at(name)
        with _clear_errors(path, "published"):
            sync_folder(self._at(hidden))
            try:
                os.rename(self._at(hidden), path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    return False
                raise
            sync_folder(self.path)
            return True

    def exchange(self, hidden: str, name: str) -> None:
        """Exchange the names of a hidden and a visible folder, durably.

        A reader sees either of them; or neither for a moment, if the file system cannot exchange.
        """
        hidden_path, other = self._at(hidden), self._at(name)
        with _clear_errors(other, "published"):
            sync_folder(hidden_path)
            if not _exchanged(hidden_path, other):
                aside = f"{hidden_path}.aside"
                os.rename(other, aside)
                os.rename(hidden_path, other)
                os.rename(aside, hidden_path)
            sync_folder(os.path.dirname(hidden_path))
            sync_folder(self.path)

    def put_aside(self, hidden: str, name: str) -> None:
        """Rename a hidden folder."""
        path = self._at(name)
        with _clear_errors(path, "written"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(self._at(hidden), path)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, checked(name))


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _exchanged(first: str, other: str) -> bool:
    """Exchange two names in a single call; False if the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    move = getattr(library, "renameat2", None)  # of Linux and its C library
    if move is None:
        return False
    here = ctypes.c_int(_HERE)
    if not move(here, os.fsencode(first), here, os.fsencode(other), ctypes.c_uint(_EXCHANGE)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), other)


def _may_be_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself: its reader reports it
        return True


def _about(path: str) -> os.stat_result:
    """The status of a file, or of a link that leads to itself."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return os.lstat(path)


def _changed(about: os.stat_result) -> datetime:
    return datetime.fromtimestamp(about.st_mtime, UTC)


def _write(path: str, parts: Iterable[Octets]) -> int:
    size = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), "wb", 0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            size += len(view)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return size


@contextmanager
def _temporary_name(path: str, *, makes_folder: bool = True) -> Generator[str]:
    """A temporary name in the same folder; its file is removed at the end."""
    folder, name = os.path.split(path)
    if makes_folder:
        os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


@contextmanager
def _clear_errors(path: str, done: str) -> Generator[None]:
    """Turn an error of the system into a `StorageError` with path and remedy."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{path} is not there") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "look at the file system")
        while error.errno == errno.ENOTDIR and not os.path.lexists(path):
            path = os.path.dirname(path)  # a file stands where a folder is wanted
        is_irregular = error.errno in (errno.ENXIO, errno.ELOOP)
        kind = IrregularFileError if is_irregular else StorageError
        raise kind(f"{path} cannot be {done}: {error.strerror}; {remedy}") from error


_REMEDIES = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "have the quota raised, or keep fewer checkpoints",
    errno.EACCES: "let the user of the training write there",
    errno.EPERM: "let the user of the training write there; a file system without hard links, "
    "such as a mounted object store, cannot be used: give that store's URL",
    errno.EROFS: "give a folder that may be written",
    errno.ENOTDIR: "give a folder",
    errno.EEXIST: "give a folder",
    errno.ENXIO: "remove it, or put a regular file in its place",
    errno.ELOOP: "remove it, as a link leads to itself",
}
