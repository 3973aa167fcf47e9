"""Exports tensors of a checkpoint as safetensors: a file, or a folder for `from_pretrained`."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer_sdk.checkpoint.flat_state import plain
from trainer_sdk.checkpoint.manifest import Manifest, step_name
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.stored_shards import StoredShards
from trainer_sdk.checkpoint.storage import Storage, StorageError
from trainer_sdk.checkpoint.storage.checkpoints import StoredCheckpoint
from trainer_sdk.checkpoint.storage.folder import sync_folder

SUFFIX = ".safetensors"
_INDEX = f"model{SUFFIX}.index.json"
_OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported."""

    path: str
    tensors: int
    size_bytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    """The keys with the prefix whose values are not tensors."""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """What to export, and in which form."""

    prefix: str
    """Keys that begin so are exported, without it."""
    most_bytes: int
    """The most bytes in a file of a folder."""
    like: str | None = None
    """A folder whose files that are not weights are copied."""


def export(storage: Storage, checkpoint: StoredCheckpoint, to: str, form: ExportForm) -> Exported:
    """Write tensors of a checkpoint; every byte that is read is verified.

    `to` is a file, if it ends with `.safetensors`, or a folder. It must not exist, and appears
    whole.
    """
    manifest = _exportable(checkpoint, to)
    hidden = f"{to.rstrip('/')}.{uuid.uuid4().hex}"
    about = {"format": "pt", "step": str(checkpoint.step), "job": manifest.identity.job}
    try:
        shards = StoredShards(storage, step_name(checkpoint.step), manifest.identity)
        tensors = _Tensors(shards, form.prefix)
        os.makedirs(hidden)
        is_file = to.endswith(SUFFIX)
        tensors.write(hidden, tensors.size_bytes if is_file else form.most_bytes, about)
        if not is_file:
            _copy(form.like, hidden)
            sync_folder(hidden)
        files = (os.path.basename(to),) if is_file else tuple(sorted(os.listdir(hidden)))
        _publish(os.path.join(hidden, f"model{SUFFIX}") if is_file else hidden, to)
    except UnfitError as error:
        raise StorageError(str(error)) from error
    except SafetensorError as error:  # what the system says of a file stands in its text only
        raise StorageError(f"{to} cannot be written, and nothing is left there: {error}") from error
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return Exported(to, len(tensors.sizes), tensors.size_bytes, files, tensors.left_out)


def _exportable(checkpoint: StoredCheckpoint, to: str) -> Manifest:
    if to.endswith(_OTHER_FORMATS):
        raise StorageError(f"{to}: safetensors alone are written: name a folder, or a file{SUFFIX}")
    if os.path.lexists(to):
        raise StorageError(f"{to} is there already: nothing was changed; export elsewhere")
    if checkpoint.manifest is None or checkpoint.flaw:
        raise StorageError(checkpoint.flaw)
    if checkpoint.quarantined is not None:
        raise StorageError(
            f"{checkpoint.path} is quarantined: {checkpoint.quarantined.reason}; release it first"
        )
    return checkpoint.manifest


class _Tensors:
    """The tensors of a checkpoint whose keys begin with a prefix."""

    def __init__(self, shards: StoredShards, prefix: str) -> None:
        self._shards = shards
        self._prefix = prefix
        self._described = shards.describe()
        kinds = self._described.state_dict_metadata
        self.sizes = {
            key: about.size.numel() * about.properties.dtype.itemsize
            for key, about in kinds.items()
            if key.startswith(prefix) and isinstance(about, TensorStorageMetadata)
        }
        self.left_out = tuple(
            key for key in kinds if key.startswith(prefix) and key not in self.sizes
        )
        self.size_bytes = sum(self.sizes.values())
        if not self.sizes:
            tops = ", ".join(sorted({key.partition(".")[0] for key in kinds}))
            raise UnfitError(f"no key of a tensor begins with {prefix!r}: there are {tops}")

    def write(self, folder: str, most_bytes: int, about: dict[str, str]) -> None:
        """Write files of at most this size, and their index if there are several."""
        groups = list(_groups(self.sizes, most_bytes))
        weights: dict[str, str] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else "model"
            tensors = self._read(group)
            path = os.path.join(folder, name + SUFFIX)
            save_file(tensors, path, about)
            _sync(path)
            weights |= dict.fromkeys(tensors, name + SUFFIX)
        if len(groups) > 1:
            index = {"metadata": {"total_size": self.size_bytes}, "weight_map": weights}
            Path(folder, _INDEX).write_text(json.dumps(index, indent=2))
            _sync(os.path.join(folder, _INDEX))

    def _read(self, keys: list[str]) -> dict[str, torch.Tensor]:
        state = {}
        for key in keys:
            about = self._described.state_dict_metadata[key]
            assert isinstance(about, TensorStorageMetadata)
            state[key] = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(state, self._described)
        plan = create_default_local_load_plan(state, self._described)
        self._shards.verify_for(plan.items)
        read = 0
        for item, octets in self._shards.read(plan.items):
            part = self._shards.part(item, octets)
            planner.resolve_tensor(item).copy_(part)
            read += part.numel()
        if read < sum(tensor.numel() for tensor in state.values()):
            raise UnfitError("the checkpoint has only parts of its tensors")
        return {plain(key.removeprefix(self._prefix)): tensor for key, tensor in state.items()}


def _groups(sizes: Mapping[str, int], most_bytes: int) -> Iterator[list[str]]:
    """The keys of each file, in their order."""
    group: list[str] = []
    filled = 0
    for key, size in sizes.items():
        if group and filled + size > most_bytes:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += size
    yield group


def _copy(like: str | None, into: str) -> None:
    """Copy configuration, tokenizer and the like, and no weights."""
    if like is None:
        return
    for name in sorted(os.listdir(like)):
        source = os.path.join(like, name)
        is_weight = name.endswith((SUFFIX, ".index.json", *_OTHER_FORMATS))
        if os.path.isfile(source) and not is_weight and not name.startswith("."):
            shutil.copyfile(source, os.path.join(into, name))
            _sync(os.path.join(into, name))


def _publish(hidden: str, to: str) -> None:
    """Give it its name; `FileExistsError` if another process has made a file there meanwhile."""
    if os.path.isfile(hidden):
        os.link(hidden, to)
    else:
        os.rename(hidden, to)
    sync_folder(os.path.dirname(os.path.abspath(to)))


def _sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
