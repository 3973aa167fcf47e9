"""Ranks that save for a test, in this process: a real writer each, real files, real gloo."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader

from tests.unit.trainer_sdk.checkpoint.saved_states import KeptReports
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, decode, step_name
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.preparation import SaverSetup
from trainer_sdk.checkpoint.save.request import OnError, Save, SaveRequest, Timeouts
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.save.saver import Saver
from trainer_sdk.checkpoint.schedule.write_rate import WriteRate

JOB = "vit-l"
WITHIN_S = 40.0
UNHURRIED = Timeouts(delayed_after_s=600.0, exit_within_s=WITHIN_S)
"""For a writer whose machine gives it no turn for many seconds: its delay is not reported."""


@dataclass
class Saving:
    """One rank."""

    saver: Saver
    queue: SaveQueue
    told: KeptReports

    def save(self, step: int, state: Mapping[str, Any], **wish: Any) -> Save | None:
        begun = self.saver.save(SaveRequest(**{"step": step, "to_root": True} | wish), state)
        return begun if isinstance(begun, Save) else None

    def finish(self) -> list[int]:
        return self.queue.maybe_finalize(blocking=True, within_s=WITHIN_S)

    def wait_for_writer(self, timeouts: Timeouts) -> None:
        """Set timeouts from now on; earlier orders keep the timeouts that they have."""
        self.queue.timeouts = timeouts

    @property
    def writer(self) -> int:
        """Its process, which is there."""
        pid = self.queue.writer_pid
        assert pid is not None
        return pid

    def events(self, name: str) -> list[dict[str, Any]]:
        return [body for event, body in self.told.events if event == name]


@contextmanager
def saving(
    folder: Path,
    group: RankGroup | None = None,
    on_error: OnError = "warn",
    optimizers: tuple[Any, ...] = (),
    timeouts: Timeouts | None = None,
    **changes: Any,
) -> Iterator[Saving]:
    """A rank that saves into `folder / "root"`, and keeps images in `folder / "images"`."""
    group, timeouts = group or RankGroup(None), timeouts or UNHURRIED
    known: dict[str, Any] = {
        "context": JobContext(JOB, 1, str(folder / "images"), has_keeper=True),
        "group": group,
        "root": str(folder / "root"),
        "keeps": False,
        "is_lazy": True,
        "buffers": 1,
        "memory_limit": 0,
        "write_bytes_per_s": 0,
        "timeouts": timeouts,
    }
    told = KeptReports()
    queue = SaveQueue(group.rank, told, on_error, timeouts)
    saver = Saver(SaverSetup(**known | changes), queue, told, WriteRate(), optimizers)
    try:
        yield Saving(saver, queue, told)
    finally:
        saver.settle()
        queue.close(abort=True)
        saver.close(keeps_images=False)


def load(folder: Path, step: int, state: dict[str, Any]) -> dict[str, Any]:
    """By torch alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone, torch says each time
        state_dict_loader.load(state, checkpoint_id=path_of(folder, step), no_dist=True)
    return state


def path_of(folder: Path, step: int) -> Path:
    return folder / "root" / step_name(step)


def manifest_of(folder: Path, step: int) -> Manifest:
    path = path_of(folder, step) / MANIFEST
    return decode(path.read_bytes(), Manifest, str(path))


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
        )
    return bool(one == other)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())
