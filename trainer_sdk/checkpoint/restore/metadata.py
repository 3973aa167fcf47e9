"""Torch's `.metadata`, which is a pickle: only torch's own descriptions in it are read."""

import io
import pathlib
import pickle  # noqa: TID251 - nothing but the classes below is ever called
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from trainer_sdk.checkpoint.restore.errors import UnfitError

_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001 - how torch writes a layout
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,  # noqa: SLF001 - what torch writes
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "Path")
    },
}


class _OnlyDescriptions(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _PLAIN.get((module, name))
        if (
            found is None
            and module == "torch"
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return found


def read_metadata(octets: bytes, place: str) -> metadata.Metadata:
    """What torch says of the tensors of a checkpoint; nothing that is read is run."""
    try:
        found = _OnlyDescriptions(io.BytesIO(octets)).load()
    except Exception as error:
        raise UnfitError(f"{place} cannot be read: {error}") from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise UnfitError(f"{place} is not what torch writes there")
    return found
