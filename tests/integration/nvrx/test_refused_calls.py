"""Saves by NVRx's names that raise at the call: the other ranks hear of them when they finalize."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.nvrx import async_calls, torch_ckpt
from trainer_sdk.nvrx.async_calls import AsyncCallsQueue, AsyncRequest
from trainer_sdk.nvrx.torch_ckpt import TorchAsyncCheckpoint


def test_a_save_that_raises_at_the_call_on_one_rank_fails_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_thread = threading.local()
    monkeypatch.setattr(torch_ckpt, "group_of_all", lambda *_: of_thread.group)
    monkeypatch.setattr(async_calls, "group_of_all", lambda *_: of_thread.group)

    def fail() -> None:
        raise OSError("no memory")

    def rank(group: RankGroup) -> list[str]:
        of_thread.group, raised = group, []
        checkpoint, queue = TorchAsyncCheckpoint(), AsyncCallsQueue()
        with suppress(ValueError):
            checkpoint.async_save({}, tmp_path / "0.pt" if not group.rank else tmp_path)
        with suppress(OSError):
            preload = fail if group.rank else dict
            queue.schedule_async_request(AsyncRequest(print, (0, 0), [], {}, preload))
        for finalize in (checkpoint.finalize_async_save, queue.maybe_finalize_async_calls):
            with pytest.raises(CheckpointException) as error:
                finalize(blocking=True, no_dist=False)
            raised.append(str(error.value))
            finalize(blocking=True, no_dist=False)
        checkpoint.close()
        queue.close()
        return raised

    own, other = together(2, rank)
    for texts in (own, other):
        assert "is not a regular file" in texts[0]
        assert "no memory" in texts[1]
