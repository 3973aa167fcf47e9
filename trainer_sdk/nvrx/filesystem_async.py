"""NVRx's writer and reader for torch.distributed.checkpoint, over the writer process.

The files are those of torch's own writer, so that every reader of torch can load them. Each rank
also writes the hashes of its files, which the reader here checks.
"""

import io
import math
import mmap
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from trainer_sdk.checkpoint.torch_format import around
from trainer_sdk.nvrx.written_files import WrittenFile, check, put_records, records_in, write

_results_queue = None
"""None, always: results come from the writer process. Megatron-LM looks at it."""
_HASHES = "everstep-hashes-{}.json"


@dataclass(frozen=True)
class _Entry:
    """A value of a plan, and where it is in its file."""

    item: WriteItem
    value: "torch.Tensor | memoryview"
    around: tuple[bytes, bytes]
    offset: int

    @property
    def length(self) -> int:
        before, after = self.around
        return len(before) + _bytes_of(self.value) + len(after)

    def fill(self, into: mmap.mmap) -> None:
        before, after = self.around
        at = self.offset
        into[at : at + len(before)] = before
        at += len(before)
        size = _bytes_of(self.value)
        if isinstance(self.value, torch.Tensor):
            if size:
                flat = torch.frombuffer(into, dtype=torch.uint8, count=size, offset=at)
                flat.copy_(self.value.contiguous().reshape(-1).view(torch.uint8))
        else:
            into[at : at + size] = bytes(self.value)
        into[at + size : at + size + len(after)] = after


@dataclass(frozen=True)
class PlannedFile:
    """A file of a plan."""

    name: str
    entries: Sequence[_Entry]

    @property
    def size_bytes(self) -> int:
        """Its size."""
        last = self.entries[-1]
        return last.offset + last.length

    def fill(self, into: mmap.mmap) -> None:
        """Copy all values."""
        for entry in self.entries:
            entry.fill(into)


class FileSystemWriterAsync(FileSystemWriter):
    """Plans the files of a rank; `get_save_function_and_args` has the functions of a request.

    `separation_hint` is the beginning of keys that get a file of their own. The other arguments of
    NVRx are for its worker process, and have no effect.
    """

    can_run_decentralized_global_plan = True

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        del use_msc, is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors
        if "://" in os.fspath(path):
            raise ValueError(
                f"{path}: this writer writes folders; for object stores use "
                "trainer_sdk.checkpoint.Checkpointer with the URL"
            )
        super().__init__(path, *args, **kwargs)
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self._own_rank = dist.get_rank() if dist.is_initialized() else 0
        self._planned: list[PlannedFile] = []
        self._written: list[WrittenFile] = []
        self._error: Exception | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Lay out the files of this rank; the values are copied when the request is scheduled."""
        given = plan.storage_data
        prefix = f"__{self._own_rank}_" if given is None else given.prefix
        hint = self.separation_hint
        apart = [item for item in plan.items if hint and item.index.fqn.startswith(hint)]
        names = {item.index for item in apart}
        others = [item for item in plan.items if item.index not in names]
        planned = ((f"{prefix}0.distcp", others), (f"{hint}{prefix}0.distcp", apart))
        self._planned = [
            PlannedFile(name, _entries(items, planner)) for name, items in planned if items
        ]
        self._written, self._error = [], None

    def get_save_function_and_args(
        self,
    ) -> "tuple[Callable[..., None], Callable[[], list[WrittenFile]], list[Any]]":
        """The function to call later, the one to call now, and the first one's arguments."""
        return self._wait, self._stage, [self._own_rank, []]

    def retrieve_write_results(self) -> "list[WriteResult] | WRAPPED_EXCEPTION":
        """What this rank has written, for the metadata; or why it could not."""
        if self._error is not None:
            return _wrap_exception(self._error)
        return [
            WriteResult(
                index=entry.item.index,
                size_in_bytes=entry.length,
                storage_data=_StorageInfo(file.name, entry.offset, entry.length),
            )
            for file in self._planned
            for entry in file.entries
        ]

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """The rank's part of the global plan, without the other ranks."""
        return replace(local_plan, storage_data=_StoragePrefix(f"__{self._own_rank}_"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write now, for `torch.distributed.checkpoint.save`."""
        self.prepare_write_data(plan, planner)
        self._wait(0, self._stage())
        if self._error is not None:
            raise self._error
        written: torch.futures.Future[Any] = torch.futures.Future()
        written.set_result(self.retrieve_write_results())
        return written

    def _stage(self) -> list[WrittenFile]:
        """Copy all values; an error is kept for the end, which all ranks reach together."""
        folder = os.fspath(self.checkpoint_dir)
        try:
            os.makedirs(folder, exist_ok=True)
            self._written = [write(file, os.path.join(folder, file.name)) for file in self._planned]
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error
        return self._written

    def _wait(self, _: int, written: Sequence[WrittenFile]) -> None:
        """Wait until the files are durable, and write their hashes."""
        if self._error is not None:
            return
        try:
            records = {os.path.basename(file.path): file.record() for file in written}
            if records:
                folder = Path(os.fspath(self.checkpoint_dir))
                put_records(folder / _HASHES.format(f"{self._own_rank:05d}"), records)
        except Exception as error:  # noqa: BLE001 - as above
            self._error = error


class CachedMetadataFileSystemReader(FileSystemReader):
    """Torch's reader, which reads metadata once for all readers, and checks hashes of files."""

    _metadata_cache: ClassVar[dict[str, Metadata]] = {}
    _checked: ClassVar[set[tuple[str, int, int]]] = set()

    def __init__(self, path: "str | os.PathLike[str]", cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._folder = Path(os.fspath(path))
        self._caches = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint."""
        key = str(self._folder.absolute())
        if not self._caches:
            return super().read_metadata(*args, **kwargs)
        if key not in self._metadata_cache:
            self._metadata_cache[key] = super().read_metadata(*args, **kwargs)
        return self._metadata_cache[key]

    @classmethod
    def clear_metadata_cache(cls, path: "str | os.PathLike[str] | None" = None) -> None:
        """Forget the metadata of a checkpoint, or of all."""
        if path is None:
            cls._metadata_cache.clear()
        else:
            cls._metadata_cache.pop(str(Path(os.fspath(path)).absolute()), None)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Check the files that the plan reads, and read them; `DamagedFileError` for a bad one."""
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        records = records_in(sorted(self._folder.glob(_HASHES.format("*"))))
        for name in sorted(names & records.keys()):
            about = os.stat(self._folder / name)
            key = str(self._folder / name), about.st_ino, about.st_mtime_ns
            if key not in self._checked:
                check(self._folder / name, records[name])
                self._checked.add(key)
        return super().read_data(plan, planner)


def get_write_results_queue(mp_mode: str = "spawn") -> "queue.Queue[Any]":
    """An empty queue: the results come from the writer process."""
    del mp_mode
    return queue.Queue()


def _entries(items: Sequence[WriteItem], planner: SavePlanner) -> list[_Entry]:
    entries: list[_Entry] = []
    offset = 0
    for item in items:
        value, octets = _value_of(planner.resolve_data(item), item)
        entries.append(_Entry(item, value, octets, offset))
        offset += entries[-1].length
    return entries


def _value_of(
    data: Any, item: WriteItem
) -> "tuple[torch.Tensor | memoryview, tuple[bytes, bytes]]":
    """A value, and what `torch.save` writes around it."""
    if item.type == WriteItemType.BYTE_IO:
        return data.getbuffer(), (b"", b"")
    tensor: torch.Tensor = data.detach()
    if "dequantize" in vars(type(tensor)):
        tensor = tensor.dequantize()
    if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor, around(tensor.dtype, tuple(tensor.shape))
    saved = io.BytesIO()
    torch.save(tensor.cpu(), saved)
    return saved.getbuffer(), (b"", b"")


def _bytes_of(value: "torch.Tensor | memoryview") -> int:
    if isinstance(value, torch.Tensor):
        return math.prod(value.shape) * value.dtype.itemsize
    return len(value)
