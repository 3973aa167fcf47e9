"""Checkpoints in an object store, through obstore: S3, Google, Azure, or memory of this process.

Credentials and endpoints come from the variables of the cloud's own tools (`AWS_…`, `GOOGLE_…`,
`AZURE_…`) or from the machine's role, never from the URL.
"""

import re
import threading
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
from obstore.store import MemoryStore, from_url

from trainer_sdk.checkpoint.manifest import MANIFEST
from trainer_sdk.checkpoint.storage.port import (
    MissingError,
    Octets,
    StorageError,
    StoredFile,
    checked,
    small,
)

if TYPE_CHECKING:
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ObjectStore, RetryConfig

RETRIES: "RetryConfig" = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
"""How long to retry an object store that is unreachable or busy."""
_PART_BYTES = 16 << 20
_AT_ONCE = 8
_LISTED_AT_ONCE = 1000
_TEXT_MOST = 400
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


class Objects:
    """A prefix of a bucket. It is not contacted before its first use."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            raise StorageError(
                f"{parts.scheme}://…{parts.path} has more than a bucket and a prefix: secrets and "
                "options belong in the environment, as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
            )
        self._url = url.rstrip("/")
        self._store = _opened(url, parts.scheme)

    @property
    def url(self) -> str:
        """Its URL."""
        return self._url

    def put(self, name: str, parts: Iterable[Octets]) -> int:
        """Write an object, or replace it; returns its size."""
        counted = _Counted(parts)
        with self._clear_errors(name, "written"):
            obstore.put(
                self._store,
                checked(name),
                counted.views(),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_AT_ONCE,
            )
        return counted.size

    def put_beside(self, name: str, data: bytes) -> None:
        """Write an object; an object store has no folders."""
        self.put(name, (data,))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless it exists: the store itself decides which writer wins."""
        with self._clear_errors(name, "written"):
            try:
                obstore.put(self._store, checked(name), data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return self.read(name) == data  # true if an earlier answer was lost
            except NotSupportedError as error:
                raise StorageError(
                    f"{self._url} cannot write an object only if it is absent (If-None-Match), "
                    "so two jobs could overwrite each other: use a store that can"
                ) from error
        return True

    def replace(self, name: str, data: bytes, before: bytes) -> bool:
        """Replace an object that has the bytes `before`; False if it has others.

        True if the object has the new bytes, also if it had them already. The store itself decides
        (If-Match), and a reader sees the old or the new bytes.
        """
        with self._clear_errors(name, "written"):
            response = obstore.get(self._store, checked(name))
            version = _version(response.meta)
            there = response.bytes().to_bytes()
            if there != before:
                return there == data
            try:
                obstore.put(self._store, name, data, mode=version, use_multipart=False)
            except PreconditionError:
                return self.read(name) == data  # true if an earlier answer was lost
            except NotSupportedError as error:
                raise StorageError(
                    f"{self._url} cannot replace only a known version of an object (If-Match), "
                    "so two jobs could overwrite each other: use a store that can"
                ) from error
        return True

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes, or all."""
        with self._clear_errors(name, "read"):
            if length is None and not start:
                stored = obstore.get(self._store, checked(name))
                small(f"{self._url}/{name}", stored.meta["size"])
                return stored.bytes().to_bytes()
            size = self._size(name)
            end = size if length is None else start + length
            if end > size:
                raise StorageError(
                    f"{self._url}/{name} ends at {size} bytes, and {end} were wanted: "
                    "it is cut short"
                )
            if start == end:
                return b""
            return obstore.get_range(self._store, checked(name), start=start, end=end).to_bytes()

    def size(self, name: str) -> int | None:
        """The size of an object; None if it does not exist."""
        try:
            with self._clear_errors(name, "read"):
                return self._size(name)
        except MissingError:
            return None

    def folders(self, inside: str = "") -> Sequence[str]:
        """The first parts of all names, or of those in `inside`; none that begins with a dot."""
        with self._clear_errors(inside, "listed"):
            prefix = checked(inside) if inside else None
            prefixes = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        names = (prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)
        return sorted(name for name in names if not name.startswith("."))

    def files(self, folder: str) -> Sequence[StoredFile]:
        """All objects below a folder, sorted by name."""
        with self._clear_errors(folder, "listed"):
            pages = obstore.list(self._store, checked(folder), chunk_size=_LISTED_AT_ONCE)
            objects = [
                StoredFile(item["path"], item["size"], item["last_modified"])
                for page in pages
                for item in page
            ]
        return sorted(objects, key=lambda item: item.name)

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""
        with self._clear_errors(name, "removed"):
            try:
                obstore.delete(self._store, checked(name))
            except FileNotFoundError:
                return

    def remove(self, folder: str) -> int:
        """Remove all objects below a folder, its manifest first."""
        objects, manifest = self.files(folder), f"{folder}/{MANIFEST}"
        self.delete(manifest)
        rest = [item.name for item in objects if item.name != manifest]
        with self._clear_errors(folder, "removed"):
            for at in range(0, len(rest), _LISTED_AT_ONCE):
                self._delete_all(rest[at : at + _LISTED_AT_ONCE])
        return sum(item.size_bytes for item in objects)

    def now(self) -> datetime:
        """The time by the store's clock."""
        name = f".clock/{uuid.uuid4().hex}"
        with self._clear_errors(name, "written"):
            obstore.put(self._store, name, b"now", use_multipart=False)
            try:
                return obstore.head(self._store, name)["last_modified"]
            finally:
                self.delete(name)

    def _delete_all(self, names: list[str]) -> None:
        try:
            obstore.delete(self._store, names)
        except FileNotFoundError:  # another process removes the same; only S3 ignores that
            for name in names:
                self.delete(name)

    def _size(self, name: str) -> int:
        return obstore.head(self._store, checked(name))["size"]

    @contextmanager
    def _clear_errors(self, name: str, done: str) -> Generator[None]:
        """Turn a client's error, which may contain XML, into one line with the place."""
        place = f"{self._url}/{name}".rstrip("/")
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            if any(code in str(error) for code in _NO_BUCKET):
                raise StorageError(
                    f"{place} cannot be {done}: there is no bucket of this name: make it, or check "
                    "the URL, the account and the endpoint"
                ) from error
            if isinstance(error, FileNotFoundError):
                raise MissingError(f"{place} is not there") from error
            raise StorageError(
                f"{place} cannot be {done}: {_one_line(error)}; check its credentials, its "
                "endpoint and the network"
            ) from error


class _Counted:
    """Counts the bytes of parts as they pass."""

    def __init__(self, parts: Iterable[Octets]) -> None:
        self._parts = parts
        self.size = 0

    def views(self) -> Generator[memoryview]:
        for part in self._parts:
            view = memoryview(part).cast("B")
            self.size += len(view)
            yield view


def _one_line(error: Exception) -> str:
    """The client's text in one line, with code and message from the server's XML."""
    own, _, theirs = str(error).partition("Debug source:")[0].partition("<?xml")
    details = re.findall(r"<(?:Code|Message)>([^<]*)<", theirs)
    return " ".join(f"{own}{': '.join(details)}".split())[:_TEXT_MOST].rstrip(": ")


def _version(about: "ObjectMeta") -> "UpdateVersion":
    """The version of an object, by which the store detects that it was replaced."""
    version: UpdateVersion = {}
    if about["e_tag"]:
        version["e_tag"] = about["e_tag"]
    if about["version"]:
        version["version"] = about["version"]
    return version


def _opened(url: str, scheme: str) -> "ObjectStore":
    if scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(url.rstrip("/"), MemoryStore())
    try:
        return from_url(url, retry_config=RETRIES)
    except (BaseError, ValueError) as error:
        raise StorageError(
            f"{url} is not a place in an object store: {_one_line(error)}"
        ) from error
