"""Where checkpoints of the global tier are kept: a folder, or an object store by its URL.

Imports no torch. The client of object stores is imported only where one is used.
"""

from urllib.parse import unquote, urlsplit

from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import Storage, StorageError

__all__ = ["Storage", "StorageError", "storage_for"]

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "memory")


def storage_for(place: str) -> Storage:
    """The storage at a path or URL. Nothing is created, and nobody is asked, before it is used."""
    scheme, separator, _ = place.partition("://")
    if not separator:
        return Folder(place)
    if scheme == "file":
        return Folder(_path_of(place))
    if scheme not in _SCHEMES:
        raise StorageError(
            f"{place} cannot hold checkpoints: give a folder, or a URL that begins with file://, "
            "s3://, gs://, az:// or memory://"
        )
    try:
        from trainer_sdk.checkpoint.storage.objects import Objects
    except ModuleNotFoundError as error:
        raise StorageError(
            f"{place} needs the client of object stores: pip install 'everstep[objectstore]'"
        ) from error
    return Objects(place)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(f"{url} is no folder of this machine: write file:///path, with three /")
    return unquote(parts.path)
