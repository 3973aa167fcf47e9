"""Storages of the global tier: a folder, or an object store by its URL.

Imports no torch. The client of object stores is imported only where one is used.
"""

import os
from urllib.parse import unquote, urlsplit

from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import Storage, StorageError

__all__ = ["Storage", "StorageError", "lasting", "storage_for"]

_OF_A_PROCESS = "memory"
_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", _OF_A_PROCESS)


def storage_for(place: str) -> Storage:
    """The storage at a path or URL. It creates and contacts nothing before it is used."""
    scheme, separator, _ = place.partition("://")
    if not separator:
        return Folder(place)
    if scheme == "file":
        return Folder(_path_of(place))
    if scheme not in _SCHEMES:
        raise StorageError(
            f"{place} cannot hold checkpoints: give a folder, or a URL that begins with file://, "
            "s3://, gs:// or az://"
        )
    try:
        from trainer_sdk.checkpoint.storage.objects import Objects
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{place} needs the client of object stores: pip install 'everstep[objectstore]'"
        ) from error
    return Objects(place)


def lasting(place: str) -> str:
    """The place as an absolute path or URL; an error if it does not outlive this process."""
    if place.startswith(f"{_OF_A_PROCESS}://"):
        raise StorageError(
            f"{place} is in the memory of one process, and the writer is another process: nothing "
            "would be saved. Give a folder or the URL of a store; for states in the memory of "
            "nodes, no root and keep_memory=True"
        )
    if any("\ud800" <= character <= "\udfff" for character in place):
        raise StorageError(f"{place!r} is not valid UTF-8, as a place must be")
    return os.path.abspath(place) if place and "://" not in place else place


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(
            f"{url} is not a folder of this machine: write file:///path, with three /"
        )
    return unquote(parts.path)
