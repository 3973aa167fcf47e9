"""Who saves: ourselves, torch, NVRx, and the limits below all of them."""

import mmap
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

State = dict[str, Any]
_CHUNK = 64 << 20
NEVER = 1 << 40


class Contender(Protocol):
    """One way to save a state, in torch's format."""

    def save(self, path: Path, state: State) -> None:
        """What the training waits for."""

    def settle(self) -> None:
        """What the next step of the optimizer waits for."""

    def finish(self) -> None:
        """Until it is durable."""

    def place(self, path: Path) -> Path | None:
        """Where torch can load what was saved last, if it can."""

    def close(self) -> None: ...


class Limit:
    """A copy of the bytes into warm memory; and, after it, a plain write of them, synced."""

    def __init__(self, state: State) -> None:
        self._size = sum(one.nbytes for one in tensors(state))
        self._whole = self._size // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped = mmap.mmap(-1, self._size + mmap.PAGESIZE)
        self._octets = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._octets.fill_(1)
        self._path = Path()

    def save(self, path: Path, state: State) -> None:
        at = 0
        for one in tensors(state):
            target = self._octets[at : at + one.nbytes].view(one.dtype).view(one.shape)
            target.copy_(one.detach())
            at += one.nbytes
        self._path = path.with_name(f"{path.name}-{dist.get_rank()}")

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        view = memoryview(self._mapped)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        descriptor = os.open(self._path, flags, 0o600)
        try:
            for at in range(0, self._whole, _CHUNK):
                os.pwrite(descriptor, view[at : min(at + _CHUNK, self._whole)], at)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def place(self, path: Path) -> None:  # it has no format
        del path
        return

    def close(self) -> None:
        pass


class Everstep:
    """With the optimizer known, or with all copied at once."""

    def __init__(self, root: Path, optimizer: Any, *, lazy: bool) -> None:
        from trainer_sdk.checkpoint import Checkpointer

        optimizers = (optimizer,) if lazy else ()
        self._root = root
        self.saves = Checkpointer(root, every=NEVER, lazy=lazy, optimizers=optimizers, job="bench")
        self._step = 0

    def save(self, path: Path, state: State) -> None:  # it names them itself
        del path
        self._step += 1
        assert self.saves.save(self._step, state, occasion="interval")

    def settle(self) -> None:
        self.saves._saver.settle()

    def finish(self) -> None:
        assert self.saves.maybe_finalize(blocking=True, within_s=600), "the save has failed"

    def place(self, path: Path) -> Path:  # it names them itself
        del path
        return self._root / f"step-{self._step:09d}"

    def close(self) -> None:
        self.saves.close()


class Torch:
    """`dcp.save`, or `dcp.async_save` with a thread or a process."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._future: Any = None

    def save(self, path: Path, state: State) -> None:
        if not self._kind:
            state_dict_saver.save(state, checkpoint_id=path)
            return
        kind = state_dict_saver.AsyncCheckpointerType[self._kind.upper()]
        self._future = state_dict_saver.async_save(
            state, checkpoint_id=path, async_checkpointer_type=kind
        )

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()

    def place(self, path: Path) -> Path:
        return path

    def close(self) -> None:
        pass


class EverstepDcp:
    """Everstep's writer below `dcp.save`, or below `dcp.async_save` with its stager."""

    def __init__(self, root: Path, *, is_async: bool, keep_memory: bool) -> None:
        from trainer_sdk.integrations.dcp import DcpStager, DcpWriter

        self._root = root
        job = f"{root.parent.name}-{root.name}"
        self._writer = DcpWriter(keep_memory=keep_memory, job=job)
        self._stager = DcpStager() if is_async else None
        self._future: Any = None
        self._step = 0

    def save(self, path: Path, state: State) -> None:  # a step is in the name
        del path
        self._step += 1
        to = f"{self._root}/step-{self._step}"
        if self._stager is None:
            state_dict_saver.save(state, checkpoint_id=to, storage_writer=self._writer)
            return
        self._future = state_dict_saver.async_save(
            state, checkpoint_id=to, storage_writer=self._writer, async_stager=self._stager
        )

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()

    def place(self, path: Path) -> Path:  # as above
        del path
        return self._root / f"step-{self._step:09d}"

    def close(self) -> None:
        self._writer.close()
        if self._stager is not None:
            self._stager.close()


class Nvrx:
    """Its writer for torch's format, with its persistent process, or a fork for each save."""

    def __init__(self, *, is_persistent: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        self._queue = AsyncCallsQueue(persistent=is_persistent)

    def save(self, path: Path, state: State) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        path.mkdir()
        writer = FileSystemWriterAsync(path, thread_count=2)
        planned = save_state_dict_async_plan(state, writer, None, planner=DefaultSavePlanner())
        call, preload, arguments = writer.get_save_function_and_args()
        done = partial(save_state_dict_async_finalize, *planned)
        request = AsyncRequest(call, arguments, [done], {}, preload)
        self._queue.schedule_async_request(request)

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=dist.get_world_size() == 1)

    def place(self, path: Path) -> Path:
        return path

    def close(self) -> None:
        with suppress(Exception):
            self._queue.close()


def do_without_cuda() -> None:
    """NVRx asks for it also where all tensors are the host's; in its own process, too."""
    cuda: Any = torch.cuda
    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(cuda, name, lambda *_: None)
    cuda.current_device, cuda.device_count = lambda: "cpu", lambda: 1
    any_torch: Any = torch
    plain = torch.empty

    def empty(*size: Any, **named: Any) -> torch.Tensor:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return plain(*size, **named)

    any_torch.empty = empty


def contender(name: str, root: Path, state: State, optimizer: Any) -> Contender:
    match name:
        case "limit":
            return Limit(state)
        case "everstep" | "everstep-lazy":
            return Everstep(root / name, optimizer, lazy=name.endswith("lazy"))
        case _ if name.startswith("everstep-dcp"):
            is_async, keeps = "-async" in name, name.endswith("-memory")
            return EverstepDcp(root / name, is_async=is_async, keep_memory=keeps)
        case "nvrx" | "nvrx-fork":
            return Nvrx(is_persistent=name == "nvrx")
        case _:
            return Torch(name.removeprefix("dcp").removeprefix("-async-"))


def tensors(state: State) -> list[torch.Tensor]:
    return [one for one in state.values() if isinstance(one, torch.Tensor)]
